"""When memory is refused, and when the wait for it is in vain."""

from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True)
class MemoryFaults:
    """When the system refuses: one call by its number, or storms of refusals, so that retries are
    refused as well."""

    rng: Random = field(default_factory=lambda: Random(0))
    calls: int = 0
    """The number of calls of add_heap, add_buffer, map and map_ahead."""
    fail_at: int = 0
    """The number of the call that is refused, counted from 1."""
    refuse_ahead: bool = False
    """Whether every map_ahead is refused."""
    rate: float = 0.0
    """The share of calls that begin a storm."""
    longest_storm: int = 1
    stuck_rate: float = 0.0
    """The share of waits that end without their ticket."""
    left: int = 0
    """Refusals that may still come."""
    refused: int = 0
    stuck: int = 0
    _storm: int = 0

    def refuse(self) -> bool:
        """Whether this call is refused."""
        self.calls += 1
        if self.calls == self.fail_at:
            self.refused += 1
            return True
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
