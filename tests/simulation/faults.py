"""When the machine refuses, and how often."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from engine.pipeline import FAILURE_WINDOW_S


@dataclass(slots=True)
class MemoryFaults:
    """When the system refuses. Storms of refusals, so that retries are refused as well."""

    rng: Random
    rate: float = 0.0
    """Of all calls, those that begin a storm."""
    longest_storm: int = 1
    stuck_rate: float = 0.0
    """Of all waits, those that end without their ticket."""
    left: int = 0
    """Refusals that may still come."""
    refused: int = 0
    stuck: int = 0
    _storm: int = 0

    def refuse(self) -> bool:
        """Whether this call is refused."""
        if not self.left:
            return False
        if not self._storm and self.rng.random() < self.rate:
            self._storm = self.rng.randint(1, self.longest_storm)
        if not self._storm:
            return False
        self._storm -= 1
        self.left -= 1
        self.refused += 1
        return True

    def stick(self) -> bool:
        """Whether this wait is in vain."""
        if not self.stuck_rate or self.rng.random() >= self.stuck_rate:
            return False
        self.stuck += 1
        return True


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
