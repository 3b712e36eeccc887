"""A model's process: started, told what it may use, ended.

It serves HTTP on a socket of the file system that only this user can reach. Over a pair of sockets
it is told things and tells them, an object of JSON in each line::

    to the process                          from it
    {"model", "settings", "kv_limit"}       {"started": true}
                                            {"loaded": bytes, "of": bytes}
                                            {"ready": true}, or {"failed": reason}
    {"kv_limit": bytes, "number"}           {"kv_limit": bytes, "number"}
    {"ping": true, "number"}                {"number"}
    {"stop": true}

The process ends when the pair is closed, so it never outlives the one that started it. One that
hangs is killed: while it loads, for want of progress; later, when a ping is not answered. Pings are
sent while somebody waits for it, so a long prompt may take as long as it likes.
"""

import asyncio
import itertools
import json
import socket
from asyncio import InvalidStateError
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpcore2
import structlog

from server.supervisor.errors import LoadError, NoAnswerError

# Connections to a process that wait for the next request are closed by us, before it does.
IDLE_CONNECTION_S = 60.0
MAX_IDLE_CONNECTIONS = 64
# How long a process may take to its first word, to the next bytes of its model, and to be ready.
STALL_TIMEOUT_S = 120.0
# How long it may be waited for until it is pinged, and then again and again.
PING_INTERVAL_S = 5.0
# How long it may take to answer each of so many pings, before it is killed.
PING_TIMEOUT_S = 10.0
PINGS = 2
# How long it may take to say what it gives back.
ANSWER_TIMEOUT_S = 10.0
# How long it may take to answer a small question of ours over HTTP.
QUESTION_TIMEOUT_S = 5.0
# Its connections are closed a little before the system says that a process has ended.
END_KNOWN_S = 2.0

# What a process that has ended does to those who ask it.
BROKEN = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ConnectionNotAvailable)

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
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._due: float | None = self._loop.time() + STALL_TIMEOUT_S
        """When it must have made progress; None once it is ready."""
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """Those that are waited for, by the numbers of their questions."""
        self._num_waiting = 0
        """Who waits for it, over HTTP or the pair."""
        self._pinging: asyncio.Task[None] | None = None
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

    @asynccontextmanager
    async def stream(
        self, method: str, target: bytes, headers: Headers, body: bytes = b""
    ) -> AsyncIterator[httpcore2.Response]:
        """Ask it; the answer is read as it comes. target: path and query. Raises NoAnswerError."""
        upstream = self._connections.stream(method, _url(target), headers=headers, content=body)
        try:
            with self._awaited():
                async with upstream as answer:
                    yield answer
        except BROKEN as error:
            await self.gone()
            unasked = isinstance(error, httpcore2.ConnectError) and self.ended.done()
            raise NoAnswerError(unasked=unasked) from error

    async def get(self, target: bytes, headers: Headers) -> httpcore2.Response:
        """Ask it for something small, whole. target: path and query. Raises NoAnswerError."""
        try:
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                async with self.stream("GET", target, headers) as answer:
                    await answer.aread()
                    return answer
        except TimeoutError as error:
            raise NoAnswerError(unasked=False) from error

    async def set_kv_limit(self, limit_bytes: int) -> int | None:
        """Let its K and V take so many bytes. Return how many it keeps all the same; None where it
        does not say."""
        with self._awaited():
            answer = await self._ask(ANSWER_TIMEOUT_S, kv_limit=limit_bytes)
        if self.ended.done():
            return 0
        return None if answer is None else int(answer["kv_limit"])

    async def stop(self) -> None:
        """End it, and wait until it has ended."""
        self.ending = True
        # While it loads it listens to nobody, and has nothing to lose.
        if not self.was_ready or not await self._answers_a_ping():
            self.kill()
        self.tell_to_stop()
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
        with suppress(ProcessLookupError):
            self._child.kill()

    def _tell(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _ask(self, timeout_s: float, **message: Any) -> dict[str, Any] | None:
        """Ask it over the pair. None where it does not answer in time, or ends before."""
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        self._tell(message | {"number": number})
        try:
            waits = (answer, self.ended)
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            del self._answers[number]

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """Ping it while somebody waits for it."""
        self._num_waiting += 1
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.create_task(self._ping())
        try:
            yield
        finally:
            self._num_waiting -= 1

    async def _ping(self) -> None:
        """Kill it where it hangs. The last ping comes when nobody waits any more: who asks may have
        less patience than we have."""
        while self._num_waiting and not self.ended.done():
            await asyncio.wait((self.ended,), timeout=PING_INTERVAL_S)
            if not await self._answers_a_ping():
                self._fail(f"does not answer within {PINGS * PING_TIMEOUT_S:g} s")

    async def _answers_a_ping(self) -> bool:
        """Return whether it is there, or has ended. The second ping is for us: where we have been
        stopped, the first one's time may be over before its answer is read."""
        for _ in range(PINGS):
            if self.ended.done() or await self._ask(PING_TIMEOUT_S, ping=True) is not None:
                return True
        return self.ended.done()

    def _fail(self, why: str) -> None:
        """Kill it, for what it did: words after "its process"."""
        self._reason = f"its process {why}"
        log.error(f"the process of {self.name} {why}: it is killed")
        self.kill()

    async def _watch(self) -> int:
        """Hear what the process says until it ends; return its exit code."""
        with suppress(OSError):
            try:
                await self._hear_all()
            except TimeoutError:
                self._fail(f"made no progress for {STALL_TIMEOUT_S:g} s")
            except (ValueError, LookupError, TypeError, RecursionError, InvalidStateError):
                self._fail("says what cannot be read")
        code = await self._child.wait()
        if not self._ready.done():
            self._ready.set_exception(LoadError(self._reason))
            self._ready.exception()  # whoever waits is told; where nobody does, it is no mistake
        self._writer.close()
        self._path.unlink(missing_ok=True)
        await self._connections.aclose()
        return code

    async def _hear_all(self) -> None:
        """Hear it to the end. Raises TimeoutError where it makes no progress, and what Python
        raises for what is no message, or a line beyond asyncio's 64 KiB."""
        last = b""
        while True:
            async with asyncio.timeout_at(self._due):
                line = await self._reader.readline()
            if not line.endswith(b"\n"):
                return
            self._hear(json.loads(line))
            if self._ready.done():
                self._due = None
            elif line != last:  # the same again is no progress
                self._due = self._loop.time() + STALL_TIMEOUT_S
            last = line

    def _hear(self, message: dict[str, Any]) -> None:
        if "loaded" in message:
            self._progress(message["loaded"], message["of"])
        elif "number" in message:
            # Nobody waits any more for an answer that comes too late.
            if (waiting := self._answers.get(message["number"])) is not None:
                waiting.set_result(message)
        elif "failed" in message:
            self._reason = message["failed"]
        elif "ready" in message:
            self._ready.set_result(None)


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
