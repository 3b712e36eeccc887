"""Ends a replica that is stopped, or hangs: a small process beside it waits for its signs of life,
and kills it where they cease. Ray sees that it is gone, and starts another one; alone it waits for
ever for a replica that hangs while it starts.

This file is also what the small process runs: it imports nothing that is not Python's.
"""

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time

# After so long without a sign of life a replica is killed. A machine that swaps may make it wait
# for some seconds.
SILENCE_S = 20.0
# What a replica may take to start: large weights are read from a slow disk, twice.
START_S = 900.0
BEAT_S = 1.0

log = logging.getLogger(__name__)


class Guard:
    """A process's signs of life: on a thread while it starts, which takes at most so long, and on
    its event loop from then on."""

    def __init__(self, silence_s: float = SILENCE_S, start_s: float = START_S) -> None:
        self._start_s = start_s
        arguments = map(str, (os.getpid(), silence_s))
        self._watching = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.PIPE,
            bufsize=0,
            # What stops a group of processes does not stop it.
            start_new_session=True,
        )
        assert self._watching.stdin is not None
        self._beats = self._watching.stdin
        # A full pipe says enough.
        os.set_blocking(self._beats.fileno(), False)
        self._is_started = threading.Event()
        self._starting = threading.Thread(target=self._keep_starting, name="guard", daemon=True)
        self._starting.start()
        self._beating: asyncio.Task[None] | None = None

    def started(self) -> None:
        """Note, on the event loop, that it answers: signs of life are this loop's from now on."""
        self._beating = asyncio.create_task(self._keep_beating())
        self._is_started.set()

    def end(self) -> None:
        """End the small process. Idempotent."""
        self._is_started.set()
        self._starting.join()
        self._beats.close()
        self._watching.kill()
        self._watching.wait()

    def _keep_starting(self) -> None:
        ends_at = time.monotonic() + self._start_s
        while time.monotonic() < ends_at:
            self._beat()
            if self._is_started.wait(BEAT_S):
                return
        log.error("not ready within %g s", self._start_s)

    async def _keep_beating(self) -> None:
        while self._beat():  # noqa: ASYNC110 - time is what is waited for
            await asyncio.sleep(BEAT_S)

    def _beat(self) -> bool:
        """Give a sign of life. Return whether anybody waits for one."""
        if self._beats.closed:
            return False
        try:
            self._beats.write(b".")
        except BrokenPipeError:
            log.warning("nobody ends this process any more where it hangs")
            return False
        return True


def watch(beats: int, pid: int, silence_s: float) -> None:
    """Kill our parent when nothing comes for so long; return when it has ended. beats: a
    descriptor. pid: of the parent."""
    while select.select([beats], [], [], silence_s)[0]:
        if not os.read(beats, select.PIPE_BUF):
            return
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.stdin.fileno(), int(sys.argv[1]), float(sys.argv[2]))
