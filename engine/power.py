"""Keeps a Mac awake while it answers requests, and reads its power state.

macOS puts an idle machine to sleep even while clients wait. Power assertions prevent this sleep
(Apple's IOPMLib.h); `pmset -g assertions` lists them. Other systems sleep only if configured to.
"""

import ctypes
import logging
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from kvcache.child import run

log = logging.getLogger(__name__)

IOKIT = "/System/Library/Frameworks/IOKit.framework/IOKit"
CORE_FOUNDATION = "/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation"
# kIOPMAssertionTypePreventUserIdleSystemSleep and kIOPMAssertionLevelOn, IOKit's constants for an
# assertion that prevents idle sleep. A Mac still sleeps if its lid is closed or its battery empty.
NO_IDLE_SLEEP = b"PreventUserIdleSystemSleep"
LEVEL_ON = 255
UTF8 = 0x08000100  # kCFStringEncodingUTF8
PMSET = "/usr/bin/pmset"
# A line of `pmset -g` in low power mode. Macs that have a high power mode print "powermode".
LOW_POWER = re.compile(r"(?:lowpowermode|powermode)\s+1")
PMSET_TIMEOUT_S = 5.0
# A jump of the time of day by less than this is an adjustment of the clock, not sleep.
SHORTEST_SLEEP_S = 10.0


class MacPower:
    """Calls IOKit, macOS's library for power management."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """Load libraries. Raises OSError (missing library) or AttributeError (missing function)."""
        core, kit = load(CORE_FOUNDATION), load(IOKIT)
        self._make_text = core.CFStringCreateWithCString
        self._make_text.restype = ctypes.c_void_p
        self._make_text.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32)
        self._free = core.CFRelease
        self._free.restype = None
        self._free.argtypes = (ctypes.c_void_p,)
        self._create = kit.IOPMAssertionCreateWithName
        self._create.restype = ctypes.c_int32
        self._create.argtypes = (
            *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_uint32),
        )
        self._release = kit.IOPMAssertionRelease
        self._release.restype = ctypes.c_int32
        self._release.argtypes = (ctypes.c_uint32,)

    def hold(self, reason: str) -> int:
        """Prevent idle sleep until ``release`` is called with the returned id. Raises OSError."""
        kind, name = (
            self._make_text(None, text, UTF8) for text in (NO_IDLE_SLEEP, reason.encode())
        )
        assertion = ctypes.c_uint32(0)
        try:
            refused = self._create(kind, LEVEL_ON, name, ctypes.byref(assertion))
        finally:
            self._free(kind)
            self._free(name)
        if refused:
            raise OSError(f"IOPMAssertionCreateWithName: {refused:#x}")
        return assertion.value

    def release(self, assertion: int) -> None:
        self._release(assertion)

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
    if platform != "darwin":
        return None
    try:
        return MacPower()
    except (OSError, AttributeError) as error:
        log.warning("the machine may fall asleep while it answers: %s", error)
        return None


class KeepAwake:
    """Keeps a machine awake while it is busy. With ``others_may_ask``, the machine also stays awake
    on mains power, because requests from other machines could not wake it. Call ``update``
    regularly."""

    def __init__(self, power: MacPower, *, others_may_ask: bool) -> None:
        self._power = power
        self._others_may_ask = others_may_ask
        self._assertion: int | None = None
        self._refused = False

    def update(self, *, busy: bool) -> None:
        wanted = busy or (self._others_may_ask and self._power.on_mains())
        if not wanted:
            self.end()
        elif self._assertion is None and not self._refused:
            try:
                self._assertion = self._power.hold("quire answers requests")
            except OSError as error:
                self._refused = True
                log.warning("the machine may fall asleep while it answers: %s", error)

    def end(self) -> None:
        if self._assertion is not None:
            self._power.release(self._assertion)
            self._assertion = None


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
