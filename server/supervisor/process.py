"""Starts, watches and ends a model's process.

The process serves HTTP on a Unix socket that only this user can reach. A pair of connected sockets
carries messages between supervisor and process, one JSON object per line::

    to the process                          from the process
    {"model", "settings", "kv_limit"}       {"started": true}
                                            {"loaded": bytes, "of": bytes}
                                            {"ready": true}, or {"failed": reason}
    {"kv_limit": bytes, "number"}           {"kv_limit": bytes, "number"}
    {"ping": true, "number"}                {"number"}
    {"stop": true}

The process ends when the pair is closed, and so never outlives the supervisor. A hanging process is
killed: during loading after STALL_TIMEOUT_S without progress, later after PINGS unanswered pings.
Pings are sent while an HTTP request waits. A request may take any time while pings are answered.
"""

import asyncio
import itertools
import json
import socket
from asyncio import InvalidStateError
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpcore2
import structlog

# The supervisor closes a connection that is idle for this long, before the process would close it.
IDLE_CONNECTION_S = 60.0
MAX_IDLE_CONNECTIONS = 64
# A loading process must send a new message at most this long after the previous message.
STALL_TIMEOUT_S = 120.0
# The log shows progress only once the loading of weights has taken at least this time.
QUIET_S = 1.0
PING_INTERVAL_S = 5.0
# The supervisor kills a process after this number of unanswered pings.
PINGS = 2
PING_TIMEOUT_S = 10.0
# Longest wait for the answer to a message ``kv_limit``.
ANSWER_TIMEOUT_S = 10.0
# Longest wait for the answer to an HTTP request of the supervisor itself, such as for metrics.
QUESTION_TIMEOUT_S = 5.0
# Longest wait for the end of a process that has closed its connections.
END_KNOWN_S = 2.0

# HTTP errors that occur if the process ends during a request.
BROKEN = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ConnectionNotAvailable)

Headers = list[tuple[bytes, bytes]]
# The text of LoadError is cut to this length, since it may quote a model's files.
MAX_REASON_CHARS = 2000

log = structlog.get_logger("quire")


class LoadError(Exception):
    """Raised if a model was not loaded. The text is a sentence for the user."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:MAX_REASON_CHARS])


class NoAnswerError(Exception):
    """Raised if a model's process ended before the end of its answer, or does not answer."""

    def __init__(self, *, unasked: bool) -> None:
        """``unasked`` is True if the process ended before it got the request."""
        super().__init__("the model's process does not answer")
        self.unasked = unasked


@dataclass(frozen=True, slots=True)
class Start:
    """The settings with which the processes of all models are started."""

    command: Sequence[str]
    """The command line, without the last arguments: the descriptors of HTTP and message socket."""
    folder: Path
    """The folder for Unix sockets, which only this user can enter."""
    stop_s: float
    """Seconds from the request to stop until the process is killed."""


class ModelProcess:
    """The supervisor's side of the process that serves one model."""

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
        """Time by which a loading process must send a new message, or None if it is ready."""
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """``{number of a sent message: its expected answer}``."""
        self._num_waiting = 0
        """Number of HTTP requests and messages that wait for the process's answer."""
        self._pinging: asyncio.Task[None] | None = None
        self._reason = "its process ended before it was ready"
        self._loaded_quarters = 0
        self._loading_since: float | None = None
        self.ending = False
        self.ended = asyncio.create_task(self._watch())
        """A task that ends with the process and returns the exit code."""

    @classmethod
    async def start(
        cls, name: str, number: int, start: Start, message: dict[str, Any]
    ) -> "ModelProcess":
        """Start a process, and send ``message``. ``number`` must be unique. Raises OSError."""
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
                    # The supervisor ends the process. A terminal's Ctrl-C must not reach it.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                path.unlink()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        process = cls(name, path, child, reader, writer, start.stop_s)
        process._tell(message)
        return process

    async def ready(self) -> None:
        """Wait until the process serves requests. Raises LoadError."""
        await asyncio.shield(self._ready)

    @property
    def alive(self) -> bool:
        """True if the process takes requests now."""
        return self.was_ready and not self.ending and not self.ended.done()

    @property
    def was_ready(self) -> bool:
        """True if the process has ever been ready for requests."""
        return self._ready.done() and self._ready.exception() is None

    @asynccontextmanager
    async def stream(
        self, method: str, target: bytes, headers: Headers, body: bytes = b""
    ) -> AsyncIterator[httpcore2.Response]:
        """Send a request for a path and query, and stream the answer. Raises NoAnswerError."""
        url = httpcore2.URL(scheme=b"http", host=b"model", target=target)
        upstream = self._connections.stream(method, url, headers=headers, content=body)
        try:
            with self._awaited():
                async with upstream as answer:
                    yield answer
        except BROKEN as error:
            await self.gone()
            unasked = isinstance(error, httpcore2.ConnectError) and self.ended.done()
            raise NoAnswerError(unasked=unasked) from error

    async def get(self, target: bytes, headers: Headers) -> httpcore2.Response | None:
        """Send a GET request for a path and query. Return the answer, or None without one."""
        with suppress(TimeoutError, NoAnswerError):
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                async with self.stream("GET", target, headers) as answer:
                    await answer.aread()
                    return answer
        return None

    async def set_kv_limit(self, limit_bytes: int) -> int | None:
        """Limit the memory for K and V. Return the new limit, or None if no answer came in time."""
        with self._awaited():
            answer = await self._ask(ANSWER_TIMEOUT_S, kv_limit=limit_bytes)
        if self.ended.done():
            return 0
        return None if answer is None else int(answer["kv_limit"])

    async def stop(self) -> None:
        """End the process, by a kill if needed, and wait until it has ended."""
        self.ending = True
        # A loading process is killed: it reads no messages, and no client reads its answers.
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
        """Send a message that makes the process end its answers with an error, and exit."""
        self.ending = True
        self._tell({"stop": True})

    async def gone(self) -> None:
        """Wait at most END_KNOWN_S for the end of a process that has closed its connections."""
        await asyncio.wait((self.ended,), timeout=END_KNOWN_S)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._child.kill()

    def _tell(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _ask(self, timeout_s: float, **message: Any) -> dict[str, Any] | None:
        """Send a message. Return the answer, or None after the timeout or the process's end."""
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
        """Ping the process as long as the context is open."""
        self._num_waiting += 1
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.create_task(self._ping())
        try:
            yield
        finally:
            self._num_waiting -= 1

    async def _ping(self) -> None:
        """Ping the process while requests wait, and kill it if it hangs. Send at least one ping,
        even if the request has ended: a client may give up early on a hanging process."""
        while self._num_waiting and not self.ended.done():
            await asyncio.wait((self.ended,), timeout=PING_INTERVAL_S)
            if not await self._answers_a_ping():
                self._fail(f"does not answer within {PINGS * PING_TIMEOUT_S:g} s")

    async def _answers_a_ping(self) -> bool:
        """Return True if the process answers a ping, or has ended. A second ping is needed after
        the supervisor was suspended: the first one times out before its answer is read."""
        for _ in range(PINGS):
            if self.ended.done() or await self._ask(PING_TIMEOUT_S, ping=True) is not None:
                return True
        return self.ended.done()

    def _fail(self, why: str) -> None:
        """Kill the process. ``why`` is a verb phrase for the log, such as: does not answer."""
        self._reason = f"its process {why}"
        log.error(f"the process of {self.name} {why}: it is killed")
        self.kill()

    async def _watch(self) -> int:
        """Read the process's messages until the process ends, and return its exit code."""
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
            self._ready.exception()  # otherwise asyncio logs it as never retrieved
        self._writer.close()
        self._path.unlink(missing_ok=True)
        await self._connections.aclose()
        return code

    async def _hear_all(self) -> None:
        """Read messages until the connection ends. Raises TimeoutError if loading makes no
        progress. A malformed line or a line of more than 64 KiB also raises an error."""
        last = b""
        while True:
            async with asyncio.timeout_at(self._due):
                line = await self._reader.readline()
            if not line.endswith(b"\n"):
                return
            self._hear(json.loads(line))
            if self._ready.done():
                self._due = None
            elif line != last:  # a repeated message is no progress
                self._due = self._loop.time() + STALL_TIMEOUT_S
            last = line

    def _hear(self, message: dict[str, Any]) -> None:
        if "loaded" in message:
            quarters = 4 * message["loaded"] // max(1, message["of"])
            if self._loading_since is None:
                self._loading_since = self._loop.time()
            late = self._loop.time() - self._loading_since >= QUIET_S
            if late and quarters > self._loaded_quarters:
                self._loaded_quarters = quarters
                log.info(f"loading {self.name}: {25 * quarters} %")
        elif "number" in message:
            # An answer that comes after the timeout has no entry here any more.
            if (waiting := self._answers.get(message["number"])) is not None:
                waiting.set_result(message)
        elif "failed" in message:
            self._reason = message["failed"]
        elif "ready" in message:
            self._ready.set_result(None)
