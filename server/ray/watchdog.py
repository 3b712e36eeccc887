"""Kills a replica that hangs. A second process does this if no byte comes on a pipe in time.

Ray replaces a replica that has ended, but waits for ever for a replica that hangs at its start. The
second process runs this file, which therefore imports only the standard library."""

import asyncio
import logging
import os
import select
import signal
import subprocess
import sys

# A replica is killed after this many seconds without a byte. Swapping may take several seconds.
SILENCE_S = 20.0
# Seconds within which a replica must start. A start may read large weights twice from a slow disk.
START_S = 900.0
BEAT_S = 1.0

log = logging.getLogger(__name__)


class Watchdog:
    """A second process that kills this one if it does not start in time or hangs later."""

    def __init__(self, silence_s: float = SILENCE_S, start_s: float = START_S) -> None:
        arguments = map(str, (os.getpid(), start_s, silence_s))
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *arguments],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # signals to this process group do not reach the second process
        )
        assert self._watcher.stdin is not None
        self._pipe = self._watcher.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self._beating: asyncio.Task[None] | None = None

    def start_beating(self) -> None:
        """Send a byte per second from the running event loop, once the replica has started."""
        self._beating = asyncio.create_task(self._keep_beating())

    def end(self) -> None:
        """End the second process. A second call does nothing."""
        self._pipe.close()
        self._watcher.kill()
        self._watcher.wait()

    async def _keep_beating(self) -> None:
        while self._beat():  # noqa: ASYNC110 - the loop paces itself, it waits for no condition
            await asyncio.sleep(BEAT_S)

    def _beat(self) -> bool:
        """Write a byte, unless the pipe is full. Return False if the second process is gone."""
        if self._pipe.closed:
            return False
        try:
            self._pipe.write(b".")
        except BrokenPipeError:
            log.warning("nobody ends this process any more where it hangs")
            return False
        return True


def watch(pipe: int, pid: int, start_s: float, silence_s: float) -> None:
    """Kill the parent process ``pid`` if no byte comes on the descriptor ``pipe`` in time. Return
    when the parent closes the pipe."""
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
