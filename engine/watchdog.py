"""Whether a step has been running for so long that nobody expects its end any more."""

# Beyond so many seconds between two looks it was the process that stood still, not the step: the
# machine slept, or somebody had stopped it.
LONGEST_BREAK_S = 3.0


class Watchdog:
    """Looked through regularly; adds up how long it has seen the same step at work."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._looked_at: float | None = None
        self._busy_since: float | None = None
        self._seen_s = 0.0

    def look(self, now: float, busy_since: float | None) -> bool:
        """Whether the step takes too long. busy_since: when it began, of the same clock as ``now``;
        None when nothing runs."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_BREAK_S)
        if busy_since is None or busy_since != self._busy_since:
            # It may have begun since the last look.
            passed = 0.0 if busy_since is None else min(passed, now - busy_since)
            self._seen_s = 0.0
        self._looked_at, self._busy_since = now, busy_since
        self._seen_s += passed
        return self._seen_s >= self._limit_s
