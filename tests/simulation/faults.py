"""What goes wrong: steps that fail, broken promises, and the trace of a seed that failed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from engine.step.pipeline import FAILURE_WINDOW_S
from engine.step.plan import StepPlan
from engine.types import TokenEvent
from tests.simulation.switches import Settings, as_options, turned_on
from tests.simulation.world import World

# How often a step fails that has others behind it which must live on, where any fail.
LATE_RATE = 0.5


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A step, written as text only when a seed fails."""

    now: float
    live: int
    plan: StepPlan | None
    refused: int
    ends: list[TokenEvent]

    def __str__(self) -> str:
        entries = self.plan.entries if self.plan else []
        runs = ", ".join(f"{e.seq_id}[{e.start}+{e.count}]" for e in entries)
        refusals = f"; {self.refused} refusals" if self.refused else ""
        ends = "".join(f"; {e.request_id} {e.finish.value}" for e in self.ends if e.finish)
        return f"{self.now:9.4f} s  {self.live:2} live  runs {runs or 'nothing'}{refusals}{ends}"


class SeedFailedError(Exception):
    """A seed that failed, with the steps that led to it."""

    def __init__(self, seed: int, settings: Settings, reason: str, trace: str) -> None:
        super().__init__(seed, settings, reason, trace)
        self.seed = seed
        self.settings = settings
        self.reason = reason
        self.trace = trace

    def __str__(self) -> str:
        switches = as_options(turned_on(self.settings))
        return f"{self.trace}\nseed {self.seed}: {self.reason}\nswitches: {switches}"


class SimulationError(AssertionError):
    """A promise of the cache or the scheduler is broken."""


@dataclass(slots=True)
class DeviceFaults:
    """The steps that fail, and the rows that come out as not finite."""

    rng: Random
    clock: Callable[[], float]
    world: World
    failed_at: list[float] = field(default_factory=list)
    pending: bool = False
    """Whether a step in flight is going to fail."""

    @property
    def ends_engine(self) -> bool:
        """Return whether the newest failure is the second within a minute."""
        *_, before, last = float("-inf"), float("-inf"), *self.failed_at
        return last - before < FAILURE_WINDOW_S

    def place_of_failure(self, entries: int) -> int | None:
        """Return the entry of a step before which it fails, or after the last, or, beyond that,
        when it is read; None when it does not."""
        if self.rng.random() >= self.world.failure_rate:
            return None
        if self.pending and not self.world.failures_end_engine:
            return None
        self.pending = True
        return self.rng.randint(0, 3 * entries + 1)

    def fails_late(self) -> bool:
        """Return whether a step fails of which nothing was seen before."""
        return self.world.failure_rate > 0 and not self.pending and self.rng.random() < LATE_RATE

    def fail(self) -> None:
        self.pending = False
        self.failed_at.append(self.clock())

    def is_bad_row(self) -> bool:
        return self.rng.random() < self.world.bad_row_rate
