"""Conversations with a server over HTTP, streamed: what was answered, when, and what was cached."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

ANSWER_TOKENS = 24
TIMEOUT_S = 120.0
WORDS = [
    "harbour",
    "lantern",
    "meadow",
    "copper",
    "violin",
    "glacier",
    "orchard",
    "compass",
    "thimble",
    "saffron",
    "walnut",
    "pepper",
    "marble",
    "ribbon",
    "anchor",
    "bramble",
    "candle",
    "feather",
    "granite",
    "hollow",
    "island",
    "juniper",
    "kettle",
    "lemon",
]
QUESTIONS = (
    "What is a block?",
    "How long should I boil an egg?",
    "Tell me about {word}.",
    "And what about {word} and rain?",
    "Why is that so?",
    "Say it again in one sentence, with {word}.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer, or why there is none."""

    text: str = ""
    first_s: float = 0.0
    """From the request to the first token."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    """The code of an error, of a response or an event."""
    retry_after: str = ""
    """The header of an error."""


@dataclass(slots=True)
class Conversation:
    """One client's messages so far."""

    number: int
    key: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin like no other one."""
        words = " ".join(WORDS[(self.number * 7 + k * 5) % len(WORDS)] for k in range(24))
        self.messages.append(
            {"role": "system", "content": f"Number {self.number}. You answer shortly. {words}."}
        )

    def next_body(self, max_tokens: int, *, whole: bool) -> dict[str, object]:
        """Ask the next question. whole: whether the answer has so many tokens in any case."""
        word = WORDS[(self.number + len(self.turns)) % len(WORDS)]
        question = QUESTIONS[len(self.turns) % len(QUESTIONS)].format(word=word)
        self.messages.append({"role": "user", "content": question})
        return {
            "model": "demo",
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": whole,
        }

    def take(self, turn: Turn) -> None:
        """Add an answer; after an error the question may be asked again."""
        self.turns.append(turn)
        if turn.error:
            self.messages.pop()
        else:
            self.messages.append({"role": "assistant", "content": turn.text})


async def ask(
    client: httpx2.AsyncClient,
    conversation: Conversation,
    max_tokens: int = ANSWER_TOKENS,
    *,
    whole: bool = False,
) -> Turn:
    """One turn. whole: see ``next_body``."""
    headers = {"authorization": f"Bearer {conversation.key}"} if conversation.key else {}
    began = time.perf_counter()
    body = conversation.next_body(max_tokens, whole=whole)
    turn = await _streamed(client, body, headers, began)
    conversation.take(turn)
    return turn


async def _streamed(
    client: httpx2.AsyncClient, body: dict[str, object], headers: dict[str, str], began: float
) -> Turn:
    text, first_s, error = "", 0.0, ""
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != 200:
            found = json.loads(await answer.aread())["error"]
            after = answer.headers.get("retry-after", "")
            return Turn(error=f"{answer.status_code} {found['code']}", retry_after=after)
        ended = False
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                error, ended = str(event["error"]["code"]), True
                continue
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta = choice["delta"]
                piece = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                if piece and not first_s:
                    first_s = time.perf_counter() - began
                text += piece
    if not ended:
        error = "silent"
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) if usage else 0
    return Turn(text, first_s, usage.get("prompt_tokens", 0), cached, error)


def client_of(port: int) -> httpx2.AsyncClient:
    """A client with a connection for each that asks."""
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S)


async def converse(port: int, conversations: Sequence[Conversation], turns: int) -> float:
    """All conversations at once, each turn after the other. Returns the seconds."""

    async def all_turns(client: httpx2.AsyncClient, conversation: Conversation) -> None:
        for _ in range(turns):
            await ask(client, conversation)

    began = time.perf_counter()
    async with client_of(port) as client:
        await asyncio.gather(*(all_turns(client, its) for its in conversations))
    return time.perf_counter() - began


def cached_share(conversations: Sequence[Conversation], alone: Sequence[Conversation]) -> float:
    """Of the prompt tokens that one server had cached behind each first turn, the part that these
    conversations' servers had."""

    def cached(them: Sequence[Conversation]) -> int:
        return sum(turn.cached_tokens for its in them for turn in its.turns[1:])

    return cached(conversations) / max(1, cached(alone))
