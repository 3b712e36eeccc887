"""Counts the slots for requests that each tenant has taken."""

from collections import Counter
from dataclasses import dataclass, field

from engine.errors import QueueFullError, ShareFullError


@dataclass(slots=True)
class Slots:
    """Slots for requests, and what each tenant may take of them. One request takes one slot."""

    max_share_ratio: float
    """The part of all slots that one tenant may take."""
    _taken: Counter[bytes] = field(default_factory=Counter)

    def max_share(self, capacity: int) -> int:
        """Return how many of so many slots one tenant may take."""
        return max(1, int(capacity * self.max_share_ratio))

    def check(self, requests: int, tenant: bytes, capacity: int) -> None:
        """Check that the tenant may take so many more of so many slots. Raises QueueFullError where
        there are not so many, and ShareFullError where other requests of its have to end first."""
        if self._taken.total() + requests > capacity:
            raise QueueFullError
        if self._taken[tenant] + requests > self.max_share(capacity):
            raise ShareFullError

    def take(self, requests: int, tenant: bytes) -> None:
        """Take slots, even where ``check`` would raise."""
        self._taken[tenant] += requests

    def free(self, tenant: bytes) -> None:
        """Free the slot of one of the tenant's requests."""
        self._taken[tenant] -= 1
        assert self._taken[tenant] >= 0, "a slot was freed twice"
        if not self._taken[tenant]:
            del self._taken[tenant]
