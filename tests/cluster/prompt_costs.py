"""What a long prompt costs where it comes in: ``python -m tests.cluster.prompt_costs``, or
``python -m tests.cluster.prompt_costs [--tokens N]``.

Each part is measured alone, the shortest of some rounds; then the event loop's longest pause while
such prompts are handed over, beside one that hashes them itself. Replicas answer at once, so
nothing but the ingress's own work is measured.
"""

import argparse
import asyncio
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from time import perf_counter
from unittest.mock import patch

from engine.memory_map import MemoryMap
from engine.types import (
    EngineLimits,
    EngineStats,
    FinishReason,
    SamplingParams,
    Submission,
    TokenEvent,
)
from server.cluster import remote_engine
from server.cluster.messages import Numbered, Refusal, ReplicaReport, Route
from server.cluster.remote_engine import RemoteEngine
from server.cluster.routing import Routing
from server.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[2] / "configs/demo/model"
TOKENS = 100_000
BLOCK_TOKENS = 32
ROUNDS = 5
TICK_S = 0.001
ONE = SamplingParams(1)


class AnsweringReplicas:
    """Replicas that say one token at once, chosen as in production."""

    def __init__(self, tokens: int) -> None:
        limits = EngineLimits(
            2 * tokens, 64, 2**17, shared_block_tokens=BLOCK_TOKENS, prefix_identity=b"model"
        )
        self._reports = {
            name: ReplicaReport(name, "here", limits, EngineStats(), 64, 0.0, 0) for name in "ab"
        }
        self._routing = Routing()
        self._routing.update({name: {} for name in self._reports})

    def _chosen(self, route: Route) -> str:
        name = self._routing.choose(route)
        assert name is not None
        return name

    async def generate(
        self, route: Route, submission: Submission
    ) -> AsyncGenerator[list[Numbered] | Refusal, None]:
        self._chosen(route)
        yield [(0, TokenEvent(0, 1, FinishReason.LENGTH))]

    async def report(self, route: Route) -> ReplicaReport:
        return self._reports[self._chosen(route)]

    async def memory_map(self, route: Route) -> MemoryMap:
        raise AssertionError("nobody asks")


async def on_the_loop(work: Callable[..., object], *arguments: object) -> object:
    """As ``asyncio.to_thread``, without the thread."""
    return work(*arguments)


async def longest_pause_s(work: Awaitable[object]) -> float:
    """How long the event loop did nothing else while it was at some work."""
    longest, last = 0.0, perf_counter()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(TICK_S)
            now = perf_counter()
            longest, last = max(longest, now - last - TICK_S), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(10 * TICK_S)
    longest = 0.0
    await work
    await asyncio.sleep(2 * TICK_S)
    ticking.cancel()
    return longest


async def handed_over(prompts: Sequence[tuple[int, ...]]) -> None:
    """All prompts are answered, one after the other."""
    engine = RemoteEngine(AnsweringReplicas(len(prompts[0])), max_backlog=8)
    await engine.ready()
    for prompt in prompts:
        stream = engine.submit(prompt, ONE)
        (event,) = await stream.next_batch(10.0)
        assert event.token_id == 1
    engine.end_all("done")


def shortest_s(work: Callable[[], object]) -> float:
    """Of some rounds."""
    found = []
    for _ in range(ROUNDS):
        began = perf_counter()
        work()
        found.append(perf_counter() - began)
    return min(found)


def some_text(tokenizer: Tokenizer, tokens: int) -> str:
    """English words of about so many tokens."""
    words = (DEMO.parents[2] / "ARCHITECTURE.md").read_text().split()
    rng = Random(1)
    some = " ".join(rng.choices(words, k=1000))
    per_text = len(tokenizer.fast.encode(some).ids)
    return " ".join(rng.choices(words, k=1000 * tokens // per_text))


def pauses_ms(tokens: int) -> dict[str, float]:
    """The longest pause of the event loop while prompts are handed over: the median of rounds."""
    ways = {"a thread hashes": asyncio.to_thread, "it hashes itself": on_the_loop}
    found: dict[str, list[float]] = {how: [] for how in ways}
    for turn in range(ROUNDS):
        rng = Random(turn)
        prompts = [tuple(rng.randrange(2**17) for _ in range(tokens)) for _ in range(2)]
        for how, way in ways.items():
            with patch("server.cluster.remote_engine.asyncio.to_thread", way):
                found[how].append(asyncio.run(longest_pause_s(handed_over(prompts))))
    return {how: 1e3 * sorted(values)[ROUNDS // 2] for how, values in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="prompt_costs", description=__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    tokens = parser.parse_args(arguments).tokens
    rng = Random(0)
    ids = tuple(rng.randrange(2**17) for _ in range(tokens))
    submission = Submission(ids, (ONE,))
    sent = pickle.dumps(submission)
    limits = EngineLimits(2 * tokens, 64, 2**17, shared_block_tokens=BLOCK_TOKENS)
    hashes, _ = remote_engine._hashed(submission, limits)
    tokenizer = Tokenizer(DEMO)
    text = some_text(tokenizer, tokens)
    parts = {
        f"tokenise {len(text):,} characters (a thread)": lambda: tokenizer.fast.encode(text),
        f"hash {len(hashes.digests):,} blocks of {BLOCK_TOKENS} tokens (a thread)": (
            lambda: remote_engine._hashed(submission, limits)
        ),
        f"pickle {len(sent):,} bytes (the handle's thread)": lambda: pickle.dumps(submission),
        "read them at the replica": lambda: pickle.loads(sent),
    }
    print(f"a prompt of {tokens:,} tokens")
    for what, work in parts.items():
        print(f"{what:<60} {1e3 * shortest_s(work):>8.1f} ms")
    for how, pause_ms in pauses_ms(tokens).items():
        print(f"{'the longest pause of the event loop where ' + how:<60} {pause_ms:>8.1f} ms")


if __name__ == "__main__":
    main()
