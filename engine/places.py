"""Who has the places that there are for requests."""

from collections import Counter
from dataclasses import dataclass, field

from engine.errors import QueueFullError, ShareFullError


@dataclass(slots=True)
class Places:
    """Places by the tenant that has them."""

    max_share_ratio: float
    """The part of all places that one tenant may take."""
    _taken: Counter[bytes] = field(default_factory=Counter)

    def max_share(self, capacity: int) -> int:
        """Places of one tenant, out of so many."""
        return max(1, int(capacity * self.max_share_ratio))

    def check(self, requests: int, tenant: bytes, capacity: int) -> None:
        """For so many more requests. Raises QueueFullError where there are not as many places;
        ShareFullError where others of the tenant have to end first."""
        if self._taken.total() + requests > capacity:
            raise QueueFullError
        if self._taken[tenant] + requests > self.max_share(capacity):
            raise ShareFullError

    def take(self, requests: int, tenant: bytes) -> None:
        """Whether there is room or not."""
        self._taken[tenant] += requests

    def release(self, tenant: bytes) -> None:
        """One of its requests has ended."""
        self._taken[tenant] -= 1
        assert self._taken[tenant] >= 0, "a place was given back twice"
        if not self._taken[tenant]:
            del self._taken[tenant]
