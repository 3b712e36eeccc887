"""When the device fails, and what the simulator says of a broken promise."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from engine.step.pipeline import FAILURE_WINDOW_S


class SimulationError(AssertionError):
    """A promise of the cache or the scheduler is broken."""


@dataclass(slots=True)
class DeviceFaults:
    """Which steps fail, and which rows come out as not finite."""

    rng: Random
    clock: Callable[[], float]
    rate: float
    """Of all steps, those that fail."""
    bad_row_rate: float
    """Of all rows that are sampled, those that are not finite."""
    is_fatal: bool
    """Whether a second step may fail within the time that ends the engine."""
    failed_at: list[float] = field(default_factory=list)
    pending: bool = False
    """Whether a step in flight is going to fail."""

    @property
    def ends_engine(self) -> bool:
        """Whether the newest failure is the second within a minute."""
        *_, before, last = float("-inf"), float("-inf"), *self.failed_at
        return last - before < FAILURE_WINDOW_S

    def place_of_failure(self, entries: int) -> int | None:
        """Before which entry of a step it fails, or after the last, or, beyond that, when it is
        read; None when it does not."""
        if self.rng.random() >= self.rate:
            return None
        now = self.clock()
        recently = self.failed_at and now - self.failed_at[-1] < FAILURE_WINDOW_S
        if not self.is_fatal and (self.pending or recently):
            return None
        self.pending = True
        return self.rng.randint(0, 3 * entries + 1)

    def fail(self) -> None:
        """A step fails now."""
        self.pending = False
        self.failed_at.append(self.clock())

    def is_bad_row(self) -> bool:
        """Whether the next row is not finite."""
        return self.rng.random() < self.bad_row_rate
