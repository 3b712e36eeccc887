"""End Python code that takes too long."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# More than it takes until an error that was sent to a thread is raised there.
LINES = 100


class TimeUp(BaseException):
    """The code took too long. No Exception: code that was not written here must not catch it."""


class TimeLimit:
    """End code within ``with limit:`` by TimeUp, at its next line.

    An operation of C has no lines: it is over when it is over, and while it holds the interpreter
    nobody else runs. TimeUp may be raised at the end of the ``with`` statement, too: whoever
    catches it stands around that.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: that the code may take, from when it begins."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._deadline = float("inf")
        self._ended = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run work, which has the ``with`` statement in it, in a worker thread; end what stands
        within when its time is up, or when nobody waits for it any more."""
        self._look()
        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self.end()
            raise
        finally:
            self._watching.cancel()

    def _look(self) -> None:
        """End what is over its time, and come back for what is not."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.end()
        else:
            loop, wait_s = asyncio.get_running_loop(), min(left, self._seconds)
            self._watching = loop.call_later(wait_s, self._look)

    def end(self) -> None:
        """End what stands within, now or as soon as it begins; once."""
        if self._ended:
            return  # and asks for no lock: TimeUp may have come to who had it
        with self._lock:
            self._ended = True
            if self._thread is not None:
                thread, error = ctypes.c_ulong(self._thread), ctypes.py_object(TimeUp)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)

    def __enter__(self) -> None:
        with self._lock:
            if self._ended:
                raise TimeUp
            self._thread = threading.get_ident()
            self._deadline = time.monotonic() + self._seconds

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._lock:
            self._thread, self._deadline = None, float("inf")
        if self._ended and kind is not TimeUp:
            # It is on its way, and must reach nobody else: it comes at one of the next lines. (It
            # cannot be taken back: that would leave the interpreter looking for it for ever.)
            for _ in range(LINES):
                time.sleep(0)
            raise TimeUp
