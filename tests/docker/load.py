"""Load of every kind that a board shows: streams with common beginnings, errors, refusals, clients
that leave, answers beyond the first, bursts that fill the queue and the memory."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx2

BURST = 24
BURST_EVERY_S = 4.0
# So many that somebody waits for longer than a scrape takes to come.
BURST_TOKENS = 320
REQUEST_TIMEOUT_S = 120.0
SEED = 6
SYSTEM = "You answer questions about quire, an inference server. " * 12
QUESTIONS = ("What is quire?", "What is a sparse buffer?", "What is a block?", "How do I start?")
FAULTS: list[tuple[str, str, bytes]] = [
    ("POST", "/v1/chat/completions", b"{"),
    ("POST", "/v1/chat/completions", b'{"messages": []}'),
    ("POST", "/v1/chat/completions", b'{"model": "other", "messages": []}'),
    ("GET", "/nowhere", b""),
    ("DELETE", "/v1/models", b""),
]


class Load:
    """Clients of one server for so many seconds, and what they were answered."""

    def __init__(self, address: str, key: str, seconds: float) -> None:
        self._headers = {"Authorization": f"Bearer {key}"}
        self._client = httpx2.AsyncClient(
            base_url=address, headers=self._headers, timeout=REQUEST_TIMEOUT_S, trust_env=False
        )
        self._end_s = time.monotonic() + seconds
        self._random = random.Random(SEED)
        self.answers: Counter[str] = Counter()
        """By status, or by what became of the client."""

    async def run(self) -> None:
        """All of them at once, until the time is over."""
        async with self._client:
            chats = [self._again(self._chat) for _ in range(3)]
            others = (self._fault, self._leave, self._several, self._alien)
            await asyncio.gather(*chats, *(self._again(one, 0.5) for one in others), self._bursts())

    async def _again(self, one: Callable[[], Awaitable[None]], pause_s: float = 0.05) -> None:
        while time.monotonic() < self._end_s:
            await one()
            await asyncio.sleep(pause_s)

    async def _bursts(self) -> None:
        while time.monotonic() < self._end_s:
            await asyncio.gather(*(self._chat(BURST_TOKENS) for _ in range(BURST)))
            await asyncio.sleep(BURST_EVERY_S)

    async def _chat(self, tokens: int = 24) -> None:
        """A stream, read to its end."""
        body = self._body(tokens)
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            self._count(answer)
            async for _ in answer.aiter_bytes():
                pass

    async def _leave(self) -> None:
        """A stream whose reader goes away after its first bytes."""
        body = self._body(400)
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                self.answers["left"] += 1
                return

    async def _several(self) -> None:
        """Answers beyond the first, which copy a partial block."""
        body = self._body(16) | {"n": 2, "stream": False}
        self._count(await self._client.post("/v1/chat/completions", json=body))

    async def _fault(self) -> None:
        """What can only be refused."""
        method, path, body = self._random.choice(FAULTS)
        headers = {"Content-Type": "application/json"}
        self._count(await self._client.request(method, path, content=body, headers=headers))

    async def _alien(self) -> None:
        """A wrong key, a name that is not ours, and a page of somebody else's."""
        for headers in (
            {"Authorization": "Bearer the-key-of-nobody-here"},
            {"Host": "elsewhere.example"},
            {"Origin": "https://elsewhere.example"},
        ):
            with suppress(httpx2.TransportError):
                self._count(await self._client.get("/v1/models", headers=headers))

    def _body(self, tokens: int) -> dict[str, object]:
        """A long common beginning, one of a few questions, sometimes a number that nobody had."""
        question = self._random.choice(QUESTIONS)
        system = SYSTEM
        if self._random.random() < 0.3:
            question = f"{self._random.randrange(10**9)} {question}"
        if self._random.random() < 0.2:
            system = f"{self._random.randrange(10**9)} {system}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        limit = {"max_tokens": tokens, "min_tokens": tokens // 2}
        return {"messages": messages, "stream": True} | limit

    def _count(self, answer: httpx2.Response) -> None:
        self.answers[str(answer.status_code)] += 1
