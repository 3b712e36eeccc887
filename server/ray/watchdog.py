"""Kill a replica that hangs: a small process beside it waits for a byte a second on a pipe.

Ray replaces a replica that is gone, but waits for ever for one that hangs while it starts. The
small process runs this file too, which therefore imports the standard library alone.
"""

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys

# A machine that swaps may keep a healthy replica silent for some seconds.
SILENCE_S = 20.0
# A start may read large weights from a slow disk, twice.
START_S = 900.0
BEAT_S = 1.0

log = logging.getLogger(__name__)


class Watchdog:
    """Watches this process: it may take ``start_s`` to start, and then has to beat."""

    def __init__(self, silence_s: float = SILENCE_S, start_s: float = START_S) -> None:
        arguments = map(str, (os.getpid(), start_s, silence_s))
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a signal to our group of processes does not stop it
        )
        assert self._watcher.stdin is not None
        self._pipe = self._watcher.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self._beating: asyncio.Task[None] | None = None

    def start_beating(self) -> None:
        """Beat on the running event loop from now on: the process has started."""
        self._beating = asyncio.create_task(self._keep_beating())

    def end(self) -> None:
        """End the small process. Idempotent."""
        self._pipe.close()
        self._watcher.kill()
        self._watcher.wait()

    async def _keep_beating(self) -> None:
        while self._beat():  # noqa: ASYNC110 - the loop paces itself, it waits for no condition
            await asyncio.sleep(BEAT_S)

    def _beat(self) -> bool:
        """Write a byte; return False once nothing reads them. A full pipe takes none, and needs
        none."""
        if self._pipe.closed:
            return False
        try:
            self._pipe.write(b".")
        except BrokenPipeError:
            log.warning("nobody ends this process any more where it hangs")
            return False
        return True


def watch(pipe: int, pid: int, start_s: float, silence_s: float) -> None:
    """Kill our parent when no byte comes in time; return when it has closed the pipe. pipe: a
    descriptor. pid: the parent's."""
    timeout_s = start_s
    while select.select([pipe], [], [], timeout_s)[0]:
        if not os.read(pipe, select.PIPE_BUF):
            return
        timeout_s = silence_s
    if os.getppid() == pid:
        sys.stderr.write(f"no sign of life within {timeout_s:g} s: the replica is killed\n")
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.stdin.fileno(), int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
