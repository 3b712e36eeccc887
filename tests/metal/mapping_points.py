"""What mapping points cost: ``python -m tests.metal.mapping_points [--steps 2000]``.

The production scheduler, cache and loop run two loads on a clock: how long a step takes, the
planner's roofline says; what the host needs, the constants below. No bytes, no model. It is an
arithmetic of a Mac that is not here, on the fastest of the planner's devices, where points weigh
most.

*Lost* is the time in which the device had nothing to do although sequences ran. The bolder way,
mapping beside steps, is what memory that ``maps_while_running`` does.
"""

import argparse
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from engine.loop import EngineLoop
from engine.planning.arithmetic import BF16, Q4
from engine.planning.cost import CostModel
from engine.planning.simulator import SimulatedClock
from engine.scheduler import Scheduler
from engine.step_plan import Outcome, StepPlan, Token
from engine.token_budget import TokenBudget
from engine.types import EngineLimits, PrefixSalt, Request, SamplingParams, TokenEvent
from kvcache.backend import Charge, Releases
from kvcache.counting import CountingBackend
from kvcache.layout import METAL_PAGES, KVFormat, paged_layout
from kvcache.manager import KVCacheManager
from kvcache.memory_budget import CacheLimits
from server.config import Config, engine_config
from tests.metal.roofline import device, shapes

GIB = 1024**3
# What the host does between the end of a step and the first command of the next one, where that was
# not begun before: read, commit and say; and build the graph and encode its first command buffer.
# Estimates for M-series chips: a graph of 940 nodes in Python takes 1.6 ms, then it is walked.
READ_S = 0.2e-3
BUILD_S = 2.1e-3
BUNDLES_S = (0.2e-3, 5e-3)
SEQUENCES = (1, 8, 32)
MODEL, DEVICE = "4B", "M4 Max"
# Room for everybody's conversations, and so little that prefixes are evicted all the time.
ROOMY_BYTES, TIGHT_BYTES = 32 * GIB, 4 * GIB
CONTEXT = 32 * 1024
VOCAB = 1 << 17
MOST_LOST = 0.02


@dataclass(frozen=True, slots=True)
class Load:
    """People, or agents, who ask again as soon as they are answered."""

    name: str
    system_tokens: int
    """That all have in common."""
    asked: tuple[int, ...]
    """Tokens of each turn's question, or of a tool's result, in turn."""
    answered: tuple[int, ...]
    """Tokens of the answers."""
    turns: int
    """After which a conversation begins anew."""


CHAT = Load("chat", 400, (60, 350, 25, 120), (250, 90, 420, 160), turns=10)
AGENT = Load("agent", 6000, (900, 300, 1500, 150), (120, 60, 300, 80), turns=12)


@dataclass(slots=True)
class CountedMemory(CountingBackend):
    """Counts changes of mappings, each buffer's run of blocks once, and lets a bundle take its
    time."""

    releases: Releases = Releases.NOTHING
    charge: Charge = Charge.HEAPS
    maps: int = 0
    unmaps: int = 0
    points: int = 0
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    bundle_s: float = 0.0
    _begun: bool = False

    def map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> bool:
        self.maps += 1
        self._begun = True
        if self.maps_while_running:
            self.clock.advance(self.bundle_s)  # a step waits for it alone
        return True

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        self.maps += 1
        return self._next_ticket()

    def unmap(self, buffer: int, block: int, count: int) -> int:
        self.unmaps += 1
        self._begun = True
        return self._next_ticket()

    def finish_mappings(self) -> None:
        if self._begun and not self.maps_while_running:
            self.points += 1
            self.clock.advance(self.bundle_s)
        self._begun = False


@dataclass(slots=True)
class Device:
    """One step after the other, each as soon as the host has submitted it and the one before it is
    done."""

    cost: CostModel
    clock: SimulatedClock
    free_at_s: float | None = None
    lost_s: float = 0.0
    busy_s: float = 0.0

    def submit(self, rows: list[tuple[int, int]]) -> float:
        """Return when the step will be done. rows: the first token and the number of each
        sequence's."""
        now, free = self.clock.now_s, self.free_at_s
        begins = now if free is None else max(now, free)
        if free is not None:
            self.lost_s += begins - free
        took = self.cost.step_seconds(rows)
        self.busy_s += took
        self.free_at_s = begins + took
        return self.free_at_s

    @property
    def lost(self) -> float:
        return self.lost_s / (self.lost_s + self.busy_s)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step in flight."""

    runner: "TimedRunner"
    epoch: int
    done_s: float
    tokens: int

    def submit(self, *_: object) -> None:
        """It was begun in full."""

    def read(self) -> list[Outcome]:
        clock = self.runner.clock
        clock.advance(max(0.0, self.done_s - clock.now_s) + READ_S)
        self.runner.completed_epoch = self.epoch
        return [Token(2)] * self.tokens

    def cancel(self) -> None:
        """No step before it can fail."""


@dataclass(slots=True)
class TimedRunner:
    """A GPU: all of a step is submitted when it is begun."""

    kv: KVCacheManager
    clock: SimulatedClock
    device: Device
    completed_epoch: int = 0

    def begin(self, plan: StepPlan, *_: object, overlapped: bool = False) -> TimedStep:
        views = self.kv.views(plan.segments)
        self.clock.advance(BUILD_S)
        done_s = self.device.submit([(e.start, e.count) for e in plan.entries])
        tokens = sum(entry.sampling is not None for entry in plan.entries)
        return TimedStep(self, views.epoch, done_s, tokens)

    def release_cache(self) -> None:
        """It keeps none."""


class Crowd:
    """Everybody's conversations: whoever has an answer asks again."""

    def __init__(self, load: Load, people: int) -> None:
        self._load = load
        self._numbers = count(1)
        self._fresh = count(10)
        self._system = self._some(load.system_tokens)
        self._said: dict[int, list[int]] = {}
        """By the request that is being answered."""
        self._turns: dict[int, int] = {}
        self._people = people

    def first(self) -> list[Request]:
        """Everybody's first question."""
        # They are not in step with one another.
        return [self._ask([*self._system], turn) for turn in range(self._people)]

    def answer(self, event: TokenEvent) -> Request | None:
        """Take a token; return what is asked then, if the answer is complete."""
        said = self._said[event.request_id]
        if event.token_id is not None:
            said.append(event.token_id)
        if event.finish is None:
            return None
        turn = self._turns.pop(event.request_id) + 1
        del self._said[event.request_id]
        room = len(said) + max(self._load.asked) + max(self._load.answered) < CONTEXT
        goes_on = turn % self._load.turns and room
        return self._ask(said if goes_on else [*self._system], turn)

    def _ask(self, said: list[int], turn: int) -> Request:
        load, number = self._load, next(self._numbers)
        said += self._some(load.asked[turn % len(load.asked)])
        self._said[number], self._turns[number] = said, turn
        params = SamplingParams(load.answered[turn % len(load.answered)], temperature=0.0)
        return Request(number, tuple(said), params, salt=PrefixSalt())

    def _some(self, tokens: int) -> list[int]:
        return [next(self._fresh) % VOCAB for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has cost."""

    lost: float
    """Of the time in which sequences ran."""
    points: float
    maps: float
    unmaps: float
    """Per 1000 steps."""
    ahead_mib: float
    """Mapped ahead, on average."""


def run(
    load: Load,
    people: int,
    bundle_s: float,
    steps: int,
    *,
    at_points: bool,
    kv_bytes: int = ROOMY_BYTES,
) -> Result:
    """The load for so many steps, after a tenth as many that do not count."""
    clock = SimulatedClock()
    config = replace(engine_config(Config()), max_num_seqs=max(SEQUENCES))
    shape = shapes()[MODEL]
    layout = paged_layout(
        shape.spec.kv_shape(KVFormat.BFLOAT16),
        max_tokens=CONTEXT,
        heap_bytes=config.heap_bytes,
        system_page_bytes=min(METAL_PAGES),
        device_pages=METAL_PAGES,
    )
    memory = CountedMemory(
        layout.groups[0], maps_while_running=not at_points, clock=clock, bundle_s=bundle_s
    )
    limits = CacheLimits(kv_bytes, config.max_num_seqs, config)
    kv = KVCacheManager(layout, [memory], limits, identity=b"points")
    most = config.max_num_batched_tokens
    scheduler = Scheduler(
        kv,
        EngineLimits(CONTEXT, config.max_num_seqs, VOCAB),
        TokenBudget(config.step_time_target_ms / 1000, 16, most, most),
        most,
    )
    timed = Device(CostModel.of(shape, device(DEVICE), Q4, BF16), clock)
    events: deque[TokenEvent] = deque()
    runner = TimedRunner(kv, clock, timed)
    loop = EngineLoop(scheduler, kv, runner, config, emit=events.extend, clock=clock)
    crowd = Crowd(load, people)
    for request in crowd.first():
        loop.mailbox.put(request)
    ahead: list[int] = []
    for number in range(steps + steps // 10):
        if number == steps // 10:
            timed.lost_s = timed.busy_s = 0.0
            memory.maps = memory.unmaps = memory.points = 0
        loop.step()
        while events:
            asked = crowd.answer(events.popleft())
            if asked is not None:
                loop.mailbox.put(asked)
        if number % 10 == 0:
            free = kv._first.pool.kept_blocks * layout.groups[0].block_bytes
            ahead.append(kv.stats().mapped_ahead_bytes + free)
    kv.check_invariants()
    per = 1000 / steps
    counted = (per * memory.points, per * memory.maps, per * memory.unmaps)
    return Result(timed.lost, *counted, sum(ahead) / len(ahead) / 2**20)


def cases() -> Iterator[tuple[Load, int, float, int]]:
    """Loads, sequences, costs of a bundle and bytes for K and V."""
    for load in (CHAT, AGENT):
        for people in SEQUENCES:
            for bundle_s in BUNDLES_S:
                yield load, people, bundle_s, ROOMY_BYTES
    for load in (CHAT, AGENT):
        for bundle_s in BUNDLES_S:
            yield load, max(SEQUENCES), bundle_s, TIGHT_BYTES


def main(arguments: Sequence[str]) -> None:
    """Exit with 1 where mapping points cost more than they may, with room for K and V."""
    parser = argparse.ArgumentParser(prog="mapping_points")
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args(arguments).steps
    print(f"Qwen3-{MODEL} in 4 bits on an {DEVICE}; {steps} steps; counts are per 1000 steps")
    print("load   seqs  K and V  bundle  mapping       lost  points    maps  unmaps  mapped ahead")
    worst = 0.0
    for load, people, bundle_s, kv_bytes in cases():
        for how, at_points in (("any time", False), ("at points", True)):
            its = run(load, people, bundle_s, steps, at_points=at_points, kv_bytes=kv_bytes)
            print(
                f"{load.name:<5} {people:>5} {kv_bytes // GIB:>4} GiB {1e3 * bundle_s:>4.1f} ms  "
                f"{how:<9} {its.lost:>8.2%} {its.points:>7.0f} {its.maps:>7.0f} "
                f"{its.unmaps:>7.0f} {its.ahead_mib:>9.0f} MiB",
                flush=True,
            )
            if at_points and kv_bytes == ROOMY_BYTES:
                worst = max(worst, its.lost)
    print(f"with room, at most {worst:.2%} is lost at mapping points; {MOST_LOST:.0%} may be")
    if worst > MOST_LOST:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
