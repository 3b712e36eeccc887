"""Looks at the running engine from outside, about once a second, on a thread of its own."""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from engine.client import EngineClient
from engine.pressure import PressureLevel, PressureSource
from engine.watchdog import Watchdog

log = logging.getLogger(__name__)

LOOK_S = 1.0
# What streams have to carry their error events, and the server to end, before the process ends
# where it stands: a thread that hangs in the device cannot be joined.
LAST_WORDS_S = 5.0

End = Callable[[int], object]


class Overseer:
    """Ends the process when a step hangs, and tells the engine how the system's memory is."""

    def __init__(
        self,
        client: EngineClient,
        *,
        watchdog_s: float,
        pressure: PressureSource | None,
        exit_code: Callable[[], int],
        end: End = os._exit,
        clock: Callable[[], float] = time.monotonic,
        stacks: TextIO | None = None,
    ) -> None:
        """client: started. pressure: None where the system's is not heeded. exit_code: what the
        process ends with, once the client has been given up. end: ends it.
        stacks: where those of all threads are written to; standard error."""
        self._client = client
        self._watchdog = Watchdog(watchdog_s)
        self._pressure = pressure
        self._exit_code = exit_code
        self._end = end
        self._clock = clock
        self._stacks = stacks
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overseer", daemon=True)

    def start(self) -> None:
        """Looks from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Looks no more; not before a look that has begun has ended."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_S):
            if not self.look():
                self._die()
                return

    def look(self) -> bool:
        """One look; False when the engine's step takes too long."""
        if self._pressure is not None:
            self._heed(PressureLevel(self._pressure()))
        return not self._watchdog.look(self._clock(), self._client.busy_since)

    def _heed(self, level: PressureLevel) -> None:
        if level != self._client.pressure:
            log.warning("memory pressure of the system: %s", level.name.lower())
            self._client.heed_pressure(level)

    def _die(self) -> None:
        """Streams get their error events at once. The server ends by itself then; where it does
        not, the process ends all the same."""
        self._client.give_up()
        log.critical(
            "a step of the engine has been running for %.0f s: the process ends; %s",
            self._client.step_age_s,
            self._client.stats,
        )
        faulthandler.dump_traceback(self._stacks or sys.__stderr__ or 2, all_threads=True)
        if not self._stopped.wait(LAST_WORDS_S):
            log.critical("the server did not end in time")
            self._end(self._exit_code())
