"""What is computed of conversations that are sent as a whole each time, by a hybrid's cache.

``python -m tests.bench.conversations [--shorter N] [--questions N] [--seed N]``

The production scheduler, cache and loop, without a model: what a step computes is counted. The
shape is Qwen3.6-35B-A3B's, whose cells are 61 MiB. *New* are the tokens of a prompt behind its
longest beginning that the engine has seen: what a cache that keeps everything would compute.
*Beyond* is what is computed beside that, in all, and by turn. Rooms differ in how many cells there
are, and how many tokens of K and V.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from engine.step_plan import Outcome, StepPlan, Token
from engine.token_budget import TokenBudget
from engine.types import EngineLimits, Request, SamplingParams, TokenEvent
from kvcache.counting import CountingBackend, CountingStates
from kvcache.layout import KVFormat, KVLayout, KVShape, KVSpec, StateSpec, paged_layout
from kvcache.manager import KVCacheManager
from kvcache.memory_budget import CacheLimits
from server.config import Config, engine_config
from tests.bench.histories import VOCABULARY, Agent, Asked, Script, Sizes, Words, in_turn, sessions

MIB = 1024**2
CONTEXT = 192 * 1024
CHUNK = 2048
# Qwen3.6-35B-A3B: 10 layers of attention, 30 gated delta nets.
SHAPE = KVShape((KVSpec(2, 256),) * 10, (StateSpec(16, 32, 128, 128, 3, KVFormat.BFLOAT16),) * 30)


class Room(NamedTuple):
    """Memory for a hybrid."""

    cells: int
    kv_tokens: int

    def __str__(self) -> str:
        return f"{self.cells} cells, {self.kv_tokens // 1024}k tokens"


# The last one is short of K and V as well.
ROOMS = (
    Room(64, 512 * 1024),
    Room(24, 512 * 1024),
    Room(8, 512 * 1024),
    Room(4, 512 * 1024),
    Room(24, 96 * 1024),
)


@dataclass(frozen=True, slots=True)
class CountedStep:
    """A step in flight."""

    runner: "CountingRunner"
    epoch: int
    samples: int

    def submit(self, *_: object) -> None:
        """It was begun in full."""

    def read(self) -> list[Outcome]:
        self.runner.completed_epoch = self.epoch
        return [Token(token) for token in self.runner.words.some(self.samples)]

    def cancel(self) -> None:
        """No step before it can fail."""


@dataclass(slots=True)
class CountingRunner:
    """Counts the rows of each sequence, and says what nobody has said before."""

    kv: KVCacheManager
    words: Words
    rows: Counter[int] = field(default_factory=Counter)
    completed_epoch: int = 0

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> CountedStep:
        epoch = self.kv.views(plan.segments).epoch
        for entry in plan.entries:
            self.rows[entry.seq_id] += entry.count
        samples = sum(entry.sampling is not None for entry in plan.entries)
        return CountedStep(self, epoch, samples)

    def release_cache(self) -> None:
        """It keeps none."""


class HybridServer:
    """An engine that counts, asked for one answer at a time."""

    def __init__(self, room: Room, words: Words, shape: KVShape = SHAPE) -> None:
        config: EngineConfig = replace(engine_config(Config()), max_num_batched_tokens=CHUNK)
        layout = a_layout(shape)
        self.memory = CountingBackend(layout.groups[0])
        limits = CacheLimits(room.kv_tokens * layout.groups[0].bytes_per_token, 32, config)
        assert shape.cell is not None
        states = CountingStates(room.cells, shape.cell.cell_bytes)
        self.kv = KVCacheManager(layout, [self.memory], limits, identity=b"", states=states)
        self.runner = CountingRunner(self.kv, words)
        sequences = max(1, min(32, room.cells // 3))
        budget = TokenBudget(1e6, 16, CHUNK, CHUNK)
        engine_limits = EngineLimits(CONTEXT, sequences, VOCABULARY)
        scheduler = Scheduler(self.kv, engine_limits, budget, CHUNK)
        self._events: list[TokenEvent] = []
        self.loop = EngineLoop(scheduler, self.kv, self.runner, config, emit=self._events.extend)
        self._asked = 0

    @property
    def block_tokens(self) -> int:
        return self.kv._layout.tokens_per_block

    @property
    def held_cells(self) -> int:
        """Cells that a later prompt could find."""
        assert self.kv._states is not None
        return sum(cell.prefix is not None for cell in self.kv._states.pool.cells)

    @property
    def evicted_cells(self) -> int:
        assert self.kv._states is not None
        return self.kv._states.pool.num_evicted

    def answer(self, asked: Asked) -> tuple[list[int], int]:
        """The tokens of the answer, and how many of the prompt's were computed."""
        self._asked += 1
        params = SamplingParams(asked.answer, temperature=0.0)
        self.loop.mailbox.put(
            Request(
                self._asked,
                tuple(asked.prompt),
                params,
                system_tokens=asked.system_tokens,
                turns=asked.turns,
            )
        )
        while not self._events or self._events[-1].finish is None:
            self.loop.run_once()
        said = [event.token_id for event in self._events if event.token_id is not None]
        self._events.clear()
        return said, self.runner.rows.pop(self._asked) - (len(said) - 1)


def a_layout(shape: KVShape) -> KVLayout:
    """As on a CPU."""
    return paged_layout(shape, max_tokens=CONTEXT, heap_bytes=64 * MIB, system_page_bytes=4096)


@dataclass(slots=True)
class Seen:
    """All token sequences that a server has seen, by the hashes of their beginnings."""

    step: int = 16
    _beginnings: dict[int, list[int]] = field(default_factory=dict)

    def known(self, tokens: list[int]) -> int:
        """How many of the leading tokens were seen before, in this order."""
        found, best = 0, None
        for length, number in self._hashes(tokens):
            if number not in self._beginnings:
                break
            found, best = length, self._beginnings[number]
        if best is None:
            return 0
        most = min(len(tokens), len(best))
        while found < most and tokens[found] == best[found]:
            found += 1
        return found

    def add(self, tokens: list[int]) -> None:
        for _, number in self._hashes(tokens):
            self._beginnings[number] = tokens

    def _hashes(self, tokens: list[int]) -> Iterable[tuple[int, int]]:
        number = 0
        for end in range(self.step, len(tokens) + 1, self.step):
            number = hash((number, *tokens[end - self.step : end]))
            yield end, number


@dataclass(slots=True)
class Account:
    """What sessions have cost."""

    prompts: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    held_cells: int = 0
    evicted_cells: int = 0
    copied_bytes: int = 0

    @property
    def beyond(self) -> list[int]:
        """Tokens computed beside the new ones, by turn."""
        return [all_ - new for all_, new in zip(self.computed, self.new, strict=True)]

    def line(self) -> str:
        beyond = self.beyond
        return (
            f"{len(self.prompts):>5} {max(self.prompts):>8,} {sum(self.new):>9,} "
            f"{sum(self.computed):>10,} {sum(beyond):>10,} {statistics.median(beyond):>7,.0f} "
            f"{max(beyond):>8,} {self.held_cells:>5} {self.evicted_cells:>7}"
        )


def play(server: HybridServer, scripts: Iterable[Script]) -> Account:
    """Sends everybody's requests, each one's next in turn."""
    account, seen = Account(), Seen()
    turns = in_turn(scripts)
    _, asked = next(turns)
    while True:
        new = len(asked.prompt) - min(seen.known(asked.prompt), len(asked.prompt) - 1)
        said, computed = server.answer(asked)
        seen.add(asked.prompt + said)
        account.prompts.append(len(asked.prompt))
        account.new.append(new)
        account.computed.append(computed)
        try:
            _, asked = turns.send(said)
        except StopIteration:
            break
    server.kv.check_invariants()
    account.held_cells, account.evicted_cells = server.held_cells, server.evicted_cells
    account.copied_bytes = server.kv.copied_bytes
    return account


def measure(kind: str, room: Room, sizes: Sizes, seed: int = 1) -> Account:
    """One kind of session on an engine of its own."""
    words = Words()
    agent = Agent(sizes, Random(seed), words)
    return play(HybridServer(room, words), sessions(agent)[kind]())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="conversations", description=__doc__)
    parser.add_argument("--shorter", type=int, default=1, help="so many times shorter")
    parser.add_argument("--questions", type=int, default=4, help="of a person in a session")
    parser.add_argument("--seed", type=int, default=1, help="of how long tools' results are")
    asked = parser.parse_args(arguments)
    sizes = replace(Sizes().shorter(asked.shorter), questions=asked.questions)
    cell, layout = SHAPE.cell, a_layout(SHAPE)
    assert cell is not None
    print(
        f"cells of {cell.cell_bytes / MIB:.0f} MiB, {SHAPE.bytes_per_token // 1024} KiB of K and V "
        f"per token in blocks of {layout.tokens_per_block} tokens, chunks of {CHUNK}"
    )
    copied = 0
    for room in ROOMS:
        print(
            f"\n{room!s:<26} {'turns':>5} {'longest':>8} {'new':>9} {'computed':>10} "
            f"{'beyond':>10} {'median':>7} {'max':>8} {'cells':>5} {'evicted':>7}"
        )
        for kind in sessions(Agent(sizes, Random(1), Words())):
            account = measure(kind, room, sizes, asked.seed)
            copied += account.copied_bytes
            print(f"  {kind:<24} {account.line()}", flush=True)
    print(f"\nbytes of K, V and states that were copied: {copied}")


if __name__ == "__main__":
    main()
