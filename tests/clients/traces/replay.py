"""Replays a conversation and holds every turn to its promise.

A turn computes no more than its new tokens and a block. New are the tokens behind the longest
sequence that was computed before and that the prompt begins with: where an agent resends all as it
was generated, these are what the agent added. Where it, or the model's template, changed what was
said before, they are all from there on: then the answer must name the place (``cache_miss``), and
the trace says what stood there.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2

from server.config import Config
from server.text.tokenizer import Tokenizer
from tests.clients.models import tokenizer_only
from tests.clients.parrot import STOP_TIMEOUT_S, Parrot, told_engine, told_service
from tests.clients.traces.agents import Agent, Json
from tests.clients.traces.conversation import Step
from tests.engines import VOCAB
from tests.server.harness import http_client, running

BLOCK_TOKENS = 16
ROLE = "<|im_start|>"


@dataclass(frozen=True, slots=True)
class Turn:
    """What a request cost."""

    prompt: int
    """Tokens."""
    new: int
    """Tokens that follow what had been computed before."""
    computed: int
    """Tokens that did not come from the cache."""
    changed: str | None = None
    """What of the history was not as it had been computed; None: nothing."""
    named: bool = True
    """Whether the answer named the place, where its API can."""

    @property
    def problem(self) -> str | None:
        """What must not be."""
        if self.computed < self.new:
            return f"{self.new - self.computed} tokens came from a cache that never had them"
        if self.computed > self.new + BLOCK_TOKENS:
            return f"{self.computed} tokens were computed for {self.new} new ones"
        if self.changed and not self.named:
            return f"{self.changed} changed, and the answer did not say where"
        return None


class Stage:
    """A model that says its lines, whatever it is asked, and remembers what it has computed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.line = ""
        """What it says next."""
        self.prompt: list[int] = []
        """Of the running request."""
        self.computed: list[list[int]] = [[]]
        """All sequences of the running conversation, with the tokens that were generated."""
        self._tokenizer = tokenizer
        self._parrot = Parrot(tokenizer)

    def __call__(self, tokens: list[int]) -> int | None:
        """The token that follows these."""
        if not self.prompt:
            self.prompt = tokens
        self._newest = tokens
        return self._parrot(tokens)

    def begin(self, line: str) -> None:
        """The next request gets this answer."""
        self.line, self.prompt = line, []
        # A new one: what was said to the same prompt before is remembered by the old one.
        self._parrot = Parrot(self._tokenizer, lambda _: line)

    def end(self) -> None:
        """The request has ended; the last token that it generated was never computed."""
        self.computed.append(self._newest)

    def shared(self) -> tuple[list[int], int]:
        """The sequence with which the prompt begins longest, and for how many tokens."""
        lengths = [common(sequence, self.prompt) for sequence in self.computed]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        return self.computed[longest], lengths[longest]

    def place(self, sequence: list[int], token: int) -> str:
        """What stands there in a conversation."""
        text = self._tokenizer.fast.decode(sequence[: token + 1], skip_special_tokens=False)
        role = text.rpartition(ROLE)[2].partition("\n")[0]
        if role != "assistant":
            return {"system": "the system prompt", "user": "a question"}.get(role, role)
        if text.rfind("<think>") > text.rfind("</think>"):
            return "thoughts"
        return "a call" if text.rfind("<tool_call>") > text.rfind("</tool_call>") else "words"


def common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


async def replay(
    name: str, agent: Agent, steps: list[Step], stage: Stage, http: httpx2.AsyncClient
) -> list[Turn]:
    """The figures of every turn. name: of the agent, which shares nothing with any other."""
    stage.computed = [[]]
    http.headers["Authorization"] = f"Bearer {name}"
    turns = []
    for step in steps:
        if step.asks is not None:
            agent.ask(step.asks)
        stage.begin(step.says)
        cached = await agent.turn(http)
        turns.append(figures(stage, cached, agent))
        stage.end()
        if step.tool_answers is not None:
            agent.hear(step.tool_answers)
    return turns


def figures(stage: Stage, cached: int, agent: Agent) -> Turn:
    """Of the request that has just been answered."""
    newest = stage.computed[-1]
    sequence, shared = stage.shared()
    intact = common(newest, stage.prompt) == len(newest)
    turn = Turn(len(stage.prompt), len(stage.prompt) - shared, len(stage.prompt) - cached)
    if intact:
        return turn
    changed = stage.place(sequence, shared)
    return replace(turn, changed=changed, named=not agent.reports or _names(agent.miss, shared))


def _names(miss: Json | None, place: int) -> bool:
    """Whether a report tells the place, or the block in which it is where only whole blocks are
    kept."""
    return miss is not None and place - BLOCK_TOKENS < int(miss["left_at"]) <= place


@asynccontextmanager
async def theatre(
    folder: Path, config: Config | None = None
) -> AsyncIterator[tuple[Stage, httpx2.AsyncClient]]:
    """A server whose model is a stage."""
    tokenizer = Tokenizer(tokenizer_only(folder, VOCAB))
    stage = Stage(tokenizer)
    client = told_engine(stage)
    try:
        service = told_service(client, tokenizer, config or Config())
        async with running(service) as app, http_client(app) as http:
            yield stage, http
    finally:
        assert client.stop(STOP_TIMEOUT_S)
