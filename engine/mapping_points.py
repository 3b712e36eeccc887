"""Says when sequences that run wait for a mapping point, so that others can join them."""

from collections.abc import Callable

from engine.kv_cache import KVCache

# Whoever is to join waits so many times as long as the newest point took, and no longer than a
# moment: others may come meanwhile, or those that run may need a point themselves.
PATIENCE = 20
LONGEST_PATIENCE_S = 0.15


class MappingPoints:
    """Measures mapping points: no step is in flight then, and the device has nothing to do."""

    def __init__(self, kv: KVCache, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._clock = clock
        self._took_s = 0.0
        """The newest one."""
        self._wanted_s: float | None = None
        """Since when one is wanted."""
        self._began_s: float | None = None

    def is_due(self) -> bool:
        """Return whether no further step may be begun before the next point. A step is in
        flight."""
        if not self._kv.wants_mapping_point:
            self._wanted_s = None
            return False
        now = self._clock()
        if self._wanted_s is None:
            self._wanted_s = now
        return now - self._wanted_s >= min(PATIENCE * self._took_s, LONGEST_PATIENCE_S)

    def begin(self) -> None:
        """Note that no step is in flight."""
        if self._kv.wants_mapping_point:
            self._began_s, self._wanted_s = self._clock(), None

    def end(self) -> None:
        """Note that a step was begun."""
        if self._began_s is not None:
            self._took_s = self._clock() - self._began_s
            self._began_s = None
