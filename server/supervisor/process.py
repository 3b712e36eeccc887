"""A model's process: started, told what it may use, ended.

It serves HTTP on a socket of the file system that only this user can reach. Over a pair of sockets
it is told things and tells them, an object of JSON in each line::

    to the process                          from it
    {"model", "settings", "kv_limit"}       {"loaded": bytes, "of": bytes}
    {"kv_limit": bytes, "number"}           {"ready": true}
    {"stop": true}                          {"kv_limit": bytes, "number"}
                                            {"failed": reason}

The process ends when the pair is closed, so it never outlives the one that started it.
"""

import asyncio
import itertools
import json
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpcore2
import structlog

from server.supervisor.errors import LoadError

# Connections to a process that wait for the next request are closed by us, before it does.
IDLE_CONNECTION_S = 60.0
MAX_IDLE_CONNECTIONS = 64
# How long a process may take to say what it gives back.
ANSWER_TIMEOUT_S = 10.0
# Its connections are closed a little before the system says that a process has ended.
END_KNOWN_S = 2.0

Headers = list[tuple[bytes, bytes]]

log = structlog.get_logger("quire")


@dataclass(frozen=True, slots=True)
class Start:
    """How a process is started."""

    command: Sequence[str]
    """Takes the numbers of its two sockets: the one to listen on, and its end of the pair."""
    folder: Path
    """Of the sockets; only this user can enter it."""
    stop_s: float
    """How long a process may take to end; then it is killed."""


class ModelProcess:
    """The process of one model."""

    def __init__(
        self,
        name: str,
        path: Path,
        child: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stop_s: float,
    ) -> None:
        self.name = name
        self.pid = child.pid
        self._connections = httpcore2.AsyncConnectionPool(
            uds=str(path),
            max_connections=None,
            max_keepalive_connections=MAX_IDLE_CONNECTIONS,
            keepalive_expiry=IDLE_CONNECTION_S,
        )
        self._path = path
        self._child = child
        self._reader = reader
        self._writer = writer
        self._stop_s = stop_s
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count()
        self._limits: dict[int, asyncio.Future[int]] = {}
        """Answers that are waited for, by the numbers of their questions."""
        self._reason = "its process ended before it was ready"
        self._progress = _progress_of(name)
        self.ending = False
        """Whether it was told to end."""
        self.ended = asyncio.create_task(self._watch())
        """Done when it has ended; its result is the exit code."""

    @classmethod
    async def start(
        cls, name: str, number: int, start: Start, message: dict[str, Any]
    ) -> "ModelProcess":
        """Start a process. number: which no other has. message: what it is told first. Raises
        OSError."""
        path = start.folder / f"{number}.sock"
        ours, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            numbers = (listener.fileno(), theirs.fileno())
            try:
                child = await asyncio.create_subprocess_exec(
                    *start.command,
                    *map(str, numbers),
                    pass_fds=numbers,
                    stdin=asyncio.subprocess.DEVNULL,
                    # A terminal's Ctrl-C is for us: we tell the processes.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                path.unlink()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        made = cls(name, path, child, reader, writer, start.stop_s)
        made._tell(message)
        return made

    async def ready(self) -> None:
        """Wait until it answers requests. Raises LoadError."""
        await asyncio.shield(self._ready)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self.was_ready and not self.ending and not self.ended.done()

    @property
    def was_ready(self) -> bool:
        """Return whether it has ever answered requests."""
        return self._ready.done() and self._ready.exception() is None

    def stream(
        self, method: str, target: bytes, headers: Headers, body: bytes
    ) -> AbstractAsyncContextManager[httpcore2.Response]:
        """Ask it; the answer is read as it comes. target: path and query. Raises what httpcore2
        raises, NetworkError and ProtocolError where it has ended."""
        return self._connections.stream(method, _url(target), headers=headers, content=body)

    async def get(self, target: bytes, headers: Headers) -> httpcore2.Response:
        """Ask it for something whole. target, errors: as for ``stream``."""
        return await self._connections.request("GET", _url(target), headers=headers)

    async def set_kv_limit(self, limit_bytes: int) -> int | None:
        """Let its K and V take so many bytes. Return how many it keeps all the same; None where it
        does not say."""
        number = next(self._numbers)
        answer = self._limits[number] = asyncio.get_running_loop().create_future()
        self._tell({"kv_limit": limit_bytes, "number": number})
        try:
            await asyncio.wait(
                (answer, self.ended),
                timeout=ANSWER_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self.ended.done():
                return 0
            return answer.result() if answer.done() else None
        finally:
            del self._limits[number]

    async def stop(self) -> None:
        """End it, and wait until it has ended."""
        self.tell_to_stop()
        if not self.was_ready:
            self.kill()  # it listens to nobody while it loads, and has nothing to lose
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stop_s):
                await asyncio.shield(self.ended)
        if not self.ended.done():
            log.warning(f"{self.name} does not end: its process is killed")
            self.kill()
        await asyncio.shield(self.ended)

    def tell_to_stop(self) -> None:
        """Tell it to end: its running answers end with an error."""
        self.ending = True
        self._tell({"stop": True})

    async def gone(self) -> None:
        """Wait until it is known to have ended, where its connections say so."""
        await asyncio.wait((self.ended,), timeout=END_KNOWN_S)

    def kill(self) -> None:
        """Kill it."""
        with suppress(ProcessLookupError):
            self._child.kill()

    def _tell(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _watch(self) -> int:
        """Hear what the process says until it ends; return its exit code."""
        with suppress(OSError):
            async for line in self._reader:
                self._hear(json.loads(line))
        code = await self._child.wait()
        if not self._ready.done():
            self._ready.set_exception(LoadError(self._reason))
            self._ready.exception()  # whoever waits is told; where nobody does, it is no mistake
        self._writer.close()
        self._path.unlink(missing_ok=True)
        await self._connections.aclose()
        return code

    def _hear(self, message: dict[str, Any]) -> None:
        if "loaded" in message:
            self._progress(message["loaded"], message["of"])
        elif "kv_limit" in message:
            self._heard_limit(message["number"], message["kv_limit"])
        elif "failed" in message:
            self._reason = message["failed"]
        else:
            self._ready.set_result(None)

    def _heard_limit(self, number: int, limit_bytes: int) -> None:
        """Pass an answer on; nobody waits any more for one that comes too late."""
        if number in self._limits:
            self._limits[number].set_result(limit_bytes)


def _url(target: bytes) -> httpcore2.URL:
    return httpcore2.URL(scheme=b"http", host=b"model", target=target)


def _progress_of(name: str) -> Callable[[int, int], None]:
    """Return what says how far a load has come, in quarters."""
    said = 0

    def progress(done: int, total: int) -> None:
        nonlocal said
        quarters = 4 * done // max(1, total)
        if quarters > said:
            said = quarters
            log.info(f"loading {name}: {25 * quarters} %")

    return progress
