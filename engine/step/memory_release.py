"""Releases unused memory when the engine is idle, and when the system is short of memory."""

from engine.config import EngineConfig
from engine.machine import PressureLevel
from engine.step.plan import StepRunner
from engine.step.scheduler import Scheduler
from kvcache.manager import KVCacheManager

# An idle loop waits this long for a message before it releases unused memory again, and longer
# once there is nothing more to release.
IDLE_POLL_S = 0.1
SETTLED_POLL_S = 5.0


class MemoryRelease:
    """Decides when the cache's prefixes and free blocks, and the runner's cache, are released."""

    def __init__(
        self, scheduler: Scheduler, kv: KVCacheManager, runner: StepRunner, config: EngineConfig
    ) -> None:
        self.is_settled = False
        """True after an idle poll that has changed nothing in the memory of K and V."""
        self.idle_since: float | None = None
        self._scheduler = scheduler
        self._kv = kv
        self._runner = runner
        self._config = config
        self._is_cleanup_due = False

    def update(self, now: float, *, busy: bool) -> None:
        """Release memory that is unused for long enough at the time ``now``."""
        if busy:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now
            self._is_cleanup_due = True
        elif now - self.idle_since >= self._config.idle_release_s:
            self._release(now - self.idle_since)

    def _release(self, idle_s: float) -> None:
        if idle_s >= self._config.prefix_keep_s:
            self._kv.evict_prefixes()
        self._kv.release_idle_memory()
        if self._is_cleanup_due:
            self._is_cleanup_due = False
            self._runner.release_cache()
            self._kv.check_invariants()

    def set_pressure(self, level: int) -> None:
        """Under memory pressure, release unused memory and admit no sequence beside running ones.
        On a GPU, a warning releases only free heaps, because macOS warns of every larger model."""
        least = PressureLevel.WARNING if self._kv.releases_at_any_time else PressureLevel.CRITICAL
        self._scheduler.holds_back = level >= least
        self._kv.set_memory_pressure(short=level > PressureLevel.NORMAL)
        self.evict_under_pressure()
        if self._scheduler.holds_back:
            self._runner.release_cache()

    def evict_under_pressure(self) -> None:
        """Evict all prefixes if memory is short, and the evicted blocks can be released."""
        if self._scheduler.holds_back and self._kv.releases_memory:
            self._kv.evict_prefixes()

    def poll_s(self, now: float) -> float:
        """Return the time until an idle engine must call ``update`` again."""
        if self.idle_since is None or not self.is_settled:
            return IDLE_POLL_S
        idle_s = now - self.idle_since
        limits = (self._config.idle_release_s, self._config.prefix_keep_s)
        return min((SETTLED_POLL_S, *(limit - idle_s for limit in limits if limit > idle_s)))
