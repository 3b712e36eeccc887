"""Finds out whether a step hangs."""

# Where more seconds lie between two checks, it was not the step that stood still, but the process:
# the machine slept, or somebody had stopped the process.
LONGEST_BREAK_S = 3.0


class Watchdog:
    """Adds up how long it has seen the same step run. To be asked regularly."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._checked_at: float | None = None
        self._busy_since: float | None = None
        self._seen_s = 0.0

    def check(self, now: float, busy_since: float | None) -> bool:
        """Return whether the step takes too long. busy_since: when it began, by the same clock as
        ``now``; None when nothing runs."""
        passed = 0.0 if self._checked_at is None else min(now - self._checked_at, LONGEST_BREAK_S)
        if busy_since is None or busy_since != self._busy_since:
            # It may have begun since the last check.
            passed = 0.0 if busy_since is None else min(passed, now - busy_since)
            self._seen_s = 0.0
        self._checked_at, self._busy_since = now, busy_since
        self._seen_s += passed
        return self._seen_s >= self._limit_s
