"""Keeps a Mac awake while it answers requests, and reads its power state.

macOS puts an idle machine to sleep even while clients wait. Its program `caffeinate` prevents this
sleep; `pmset -g assertions` lists who does. Other systems sleep only if configured to.
"""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable

import psutil

from kvcache.child import run

log = logging.getLogger(__name__)

CAFFEINATE = "/usr/bin/caffeinate"
PMSET = "/usr/bin/pmset"
# A line of `pmset -g` in low power mode. Macs that have a high power mode print "powermode".
LOW_POWER = re.compile(r"(?:lowpowermode|powermode)\s+1")
PMSET_TIMEOUT_S = 5.0
# A jump of the time of day by less than this is an adjustment of the clock, not sleep.
SHORTEST_SLEEP_S = 10.0


class MacPower:
    """Runs macOS's programs for power management."""

    def hold(self) -> int:
        """Prevent idle sleep until ``release`` gets the returned process id, or this process ends.
        A Mac still sleeps if its lid is closed or its battery is empty. Raises OSError."""
        # Not by subprocess, whose fork would copy the page tables of all K and V.
        command = [CAFFEINATE, "-i", "-w", str(os.getpid())]
        return os.posix_spawn(CAFFEINATE, command, os.environ, setpgroup=0)

    def release(self, holder: int) -> None:
        os.kill(holder, signal.SIGTERM)
        os.waitpid(holder, 0)

    def on_mains(self) -> bool:
        battery = psutil.sensors_battery()
        return battery is None or bool(battery.power_plugged)

    def saves(self) -> bool:
        """Return True if the machine is in its low power mode."""
        try:
            _, lines, _ = run([PMSET, "-g"], PMSET_TIMEOUT_S)
        except OSError:
            return False
        return any(map(LOW_POWER.fullmatch, lines))


def power_of(platform: str = sys.platform) -> MacPower | None:
    return MacPower() if platform == "darwin" else None


class KeepAwake:
    """Keeps a machine awake while it is busy. With ``others_may_ask``, the machine also stays awake
    on mains power, because requests from other machines could not wake it. Call ``update``
    regularly."""

    def __init__(self, power: MacPower, *, others_may_ask: bool) -> None:
        self._power = power
        self._others_may_ask = others_may_ask
        self._holder: int | None = None
        self._refused = False

    def update(self, *, busy: bool) -> None:
        wanted = busy or (self._others_may_ask and self._power.on_mains())
        if not wanted:
            self.end()
        elif self._holder is None and not self._refused:
            try:
                self._holder = self._power.hold()
            except OSError as error:
                self._refused = True
                log.warning("the machine may fall asleep while it answers: %s", error)

    def end(self) -> None:
        if self._holder is not None:
            self._power.release(self._holder)
            self._holder = None


class SleepDetector:
    """Detects that the machine has slept, because the time of day advanced more than the monotonic
    clock. A change of the time of day to a later time counts as sleep, too."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._time_of_day = time_of_day
        self._ahead_s = time_of_day() - clock()

    def slept_s(self) -> float:
        """Return the seconds that the machine slept since the last call."""
        ahead_s = self._time_of_day() - self._clock()
        slept_s = ahead_s - self._ahead_s
        self._ahead_s = ahead_s
        return slept_s if slept_s >= SHORTEST_SLEEP_S else 0.0
