"""Watches the running engine about once a second, on a thread of its own."""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from engine.client import EngineClient
from engine.machine import PressureLevel
from engine.power import KeepAwake

log = logging.getLogger(__name__)

POLL_S, IDLE_POLL_S = 1.0, 2.0
# After a hang, the server has this long to send error events and end. Then the process exits at
# once, because a thread that hangs in the device cannot be joined.
SHUTDOWN_GRACE_S = 5.0
# A longer time between two checks means that the whole process stood still, not that a step hangs:
# the machine slept, or the process was stopped.
LONGEST_BREAK_S = 3.0


class Watchdog:
    """Detects a step that runs longer than a limit. Call ``check`` regularly."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._checked_at: float | None = None
        self._busy_since: float | None = None
        self._seen_s = 0.0

    def check(self, now: float, busy_since: float | None) -> bool:
        passed = 0.0 if self._checked_at is None else min(now - self._checked_at, LONGEST_BREAK_S)
        if busy_since is None or busy_since != self._busy_since:
            # Only the time since the step began counts. It may have begun after the last check.
            passed = 0.0 if busy_since is None else min(passed, now - busy_since)
            self._seen_s = 0.0
        self._checked_at, self._busy_since = now, busy_since
        self._seen_s += passed
        return self._seen_s >= self._limit_s


@dataclass
class EngineMonitor:
    """Ends the process when a step hangs. Reports memory pressure and the machine's sleep to the
    engine. Keeps the machine awake while there are requests."""

    client: EngineClient
    """The client of an engine that has been started."""
    _: KW_ONLY
    watchdog_s: float
    pressure: Callable[[], PressureLevel] | None
    """A function that returns the memory pressure, or None to ignore it."""
    exit_code: Callable[[], int]
    """A function that returns the exit code of the process after a hang."""
    awake: KeepAwake | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._watchdog = Watchdog(self.watchdog_s)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        if self.awake is not None:
            self.awake.end()

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S if self.client.busy_since else IDLE_POLL_S):
            if not self.poll():
                self._die()
                return

    def poll(self) -> bool:
        """Report the memory pressure; return False when the engine's step takes too long."""
        self.client.notice_sleep()
        if self.awake is not None:
            self.awake.update(busy=self.client.in_flight > 0)
        if self.pressure is not None:
            level = self.pressure()
            if level != self.client.pressure:
                log.warning("memory pressure of the system: %s", level.name.lower())
                self.client.set_memory_pressure(level)
        return not self._watchdog.check(self.clock(), self.client.busy_since)

    def _die(self) -> None:
        """End all streams with an error. If the server does not end in time, end the process."""
        self.client.declare_dead()
        log.critical(
            "a step of the engine has been running for %.0f s: the process ends; %s",
            self.client.step_age_s,
            self.client.stats,
        )
        faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        if not self._stopped.wait(SHUTDOWN_GRACE_S):
            log.critical("the server did not end in time")
            os._exit(self.exit_code())
