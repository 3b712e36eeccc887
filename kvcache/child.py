"""Processes for what may hang, crash or take too much memory. ``run`` runs a program to its end. A
``Child`` calls functions of this code base that read foreign files or run foreign code.

``python -m kvcache.child`` is a Child's process. It reads JSON from standard input: the modules to
import, and the function to prepare with. Then a socket, whose number is its argument, brings two
descriptors for each call: a file with the function, its arguments and its limits, and a connection.
The process that runs the call writes lines of JSON to the connection: ``{"pid"}`` when the
function's time starts, and then ``{"result"}``. If it was forked and ends without a result, its
parent writes ``{"code"}``. It is killed if the other side closes the connection."""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from enum import Enum
from importlib import import_module
from math import ceil
from pkgutil import resolve_name
from tempfile import TemporaryFile
from typing import IO, Any

import psutil

COMMAND = (sys.executable, "-P", "-m", "kvcache.child")  # -P: no modules of the working directory
# Variables that Python may need to start in the same way as this process. Others may be API keys.
KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
# The time limit for the start of a Child's process, which mostly imports modules.
START_LIMIT_S = 60.0
POLL_S = 0.02
# The time to wait for a killed process. A process that hangs in a driver may never end.
KILL_LIMIT_S = 5.0
MAX_ANSWER_BYTES = 4 << 20
CHUNK_BYTES = 1 << 18
# A program's output is read from this many bytes before its end.
OUTPUT_BYTES = 1 << 20
# The allowed addresses per allowed byte of memory. Libraries reserve more than they use.
ADDRESSES_PER_BYTE = 4
NO_MEMORY_CODE = 12
Process = subprocess.Popen[bytes]
# NOT_RUN: the process did not start, or something else than the call ended it.
Cause = Enum("Cause", "NOT_RUN CPU WALL MEMORY DIED")


class LimitError(Exception):
    """Raised if a call in another process has no result. The message is the reason."""

    def __init__(self, reason: str, cause: Cause) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one call."""

    cpu_s: float
    wall_s: float
    memory_bytes: int
    """The limit of the process's memory, without what a forked process inherits."""
    nice: int = 0

    def to_error(self, cause: Cause, code: int | None = None) -> LimitError:
        """Return the error of a call, whose process may have ended with an exit code."""
        cause = {-signal.SIGPROF: Cause.CPU, NO_MEMORY_CODE: Cause.MEMORY}.get(code or 0, cause)
        reasons = {
            Cause.CPU: f"it takes more than {self.cpu_s:.0f} s",
            Cause.WALL: f"it takes more than {self.wall_s:.0f} s",
            Cause.MEMORY: f"it takes more than {self.memory_bytes >> 20} MiB of memory",
        }
        return LimitError(reasons.get(cause, f"its process ended with {code}"), cause)


@dataclass(slots=True, eq=False)
class Child:
    """Calls functions in another process, which the first call or ``start`` starts. After a process
    has exceeded a limit, the next call starts another one."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process, in addition to KEPT."""
    modules: Sequence[str] = ()
    """Modules that the process imports before the first call."""
    prepare: tuple[Callable[..., Any], *tuple[Any, ...]] | None = None
    """A function and its arguments. The process calls it once, and then forks a process for each
    call, whose function gets the result as its first argument. Several threads may call at once.
    The process must not import MLX or numpy: on macOS, forked processes cannot use them."""
    _running: tuple[Process, socket.socket] | None = None
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> tuple[Process, socket.socket]:
        """Start the process if it does not run. It imports modules in the background."""
        with self._starting:
            running = self._running
            if running is None or running[0].poll() is not None:
                self.close()
                running = self._running = self._start()
            return running

    def _start(self) -> tuple[Process, socket.socket]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        ours, theirs = socket.socketpair()
        with theirs, _write_file([self.modules, self.prepare]) as settings:
            process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                stdin=settings,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**kept, **self.variables},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C reaches only the parent
            )
        return process, ours

    def close(self) -> int | None:
        """Kill the process, and what it has forked. Return its exit code, or None without one."""
        running, self._running = self._running, None
        if running is None:
            return None
        running[1].close()
        return end(running[0])

    def call(self, limits: Limits, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``work`` with JSON values. If that fails, end its process and raise LimitError."""
        process, calls = self.start()
        ours, theirs = socket.socketpair()
        try:
            with ours, theirs, _write_file([work, arguments, astuple(limits)]) as request:
                with suppress(OSError):  # the process may have ended
                    socket.send_fds(calls, [b"c"], [request.fileno(), theirs.fileno()])
                return self._wait_for_result(limits, process, ours, theirs)
        except BaseException as error:
            if self.prepare is None or getattr(error, "cause", None) is Cause.NOT_RUN:
                self.close()
            raise

    def _wait_for_result(
        self, limits: Limits, process: Process, ours: socket.socket, theirs: socket.socket
    ) -> Any:
        pid, has_ended, deadline = 0, False, time.monotonic() + START_LIMIT_S
        late = LimitError(f"it takes more than {START_LIMIT_S:.0f} s", Cause.NOT_RUN)
        for line in _read_lines(ours):
            match _parse(line):
                case {"result": result}:
                    return result
                case {"code": int(code)}:
                    raise limits.to_error(Cause.DIED if pid else Cause.NOT_RUN, code)
                case {"pid": int(number)}:
                    pid, deadline = number, time.monotonic() + limits.wall_s
                    late = limits.to_error(Cause.WALL)
                    theirs.close()  # not before: macOS closes what is on its way, too
            if has_ended and not pid:
                break
            has_ended = process.poll() is not None  # it may have written a line before
            if time.monotonic() > deadline:
                raise late
            with suppress(psutil.Error):
                inherited = psutil.Process(process.pid).memory_info().rss if self.prepare else 0
                taken_bytes = psutil.Process(pid).memory_info().rss - inherited if pid else 0
                if taken_bytes > limits.memory_bytes:
                    raise limits.to_error(Cause.MEMORY)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_LIMIT_S)
        cause = Cause.DIED if pid and not self.prepare else Cause.NOT_RUN
        raise limits.to_error(cause, self.close())


def _write_file(content: Any) -> IO[bytes]:
    """Return a file with JSON. Unlike a pipe, it takes any amount before somebody reads."""
    in_memory = getattr(os, "memfd_create", None)  # needs no writable folder; macOS has none
    file = open(in_memory("call"), "w+b") if in_memory else TemporaryFile()  # noqa: SIM115
    file.write(json.dumps(content, default=_to_text).encode())
    file.seek(0)
    return file


def _to_text(value: Any) -> str:
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return value.decode() if isinstance(value, bytes) else str(value)


def _read_lines(connection: socket.socket) -> Iterator[bytes]:
    """Yield lines until the other side ends, and b"" every POLL_S. Raises LimitError."""
    connection.settimeout(POLL_S)
    text = b""
    while len(text) <= MAX_ANSWER_BYTES:
        yield b""
        with suppress(TimeoutError):
            if not (more := connection.recv(CHUNK_BYTES)):
                return
            *lines, text = (text + more).split(b"\n")
            yield from lines
    reason = f"it takes more than {MAX_ANSWER_BYTES >> 20} MiB of answers"
    raise LimitError(reason, Cause.DIED)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line or b"{}")
    except (ValueError, RecursionError):
        raise LimitError("its process writes what is no JSON", Cause.DIED) from None


def end(process: Process) -> int | None:
    """Kill a process and the session that it leads. Return its exit code, or None if it hangs."""
    if process.returncode is None:  # else its number may be another process's
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_LIMIT_S)
    return process.returncode


def run(command: Sequence[str], limit_s: float) -> tuple[int | None, list[str], list[str]]:
    """Run a program that may crash, hang, or write anything. Return its exit code, or None beyond
    the limit, and the last lines of its output and of its error output. Raises OSError."""
    # Files are used instead of pipes: reading a pipe would wait for a process that cannot be ended.
    with TemporaryFile() as out, TemporaryFile() as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        code = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            end(process)
        return code, _read_last_lines(out), _read_last_lines(err)


def _read_last_lines(file: IO[bytes]) -> list[str]:
    file.seek(-min(file.seek(0, os.SEEK_END), OUTPUT_BYTES), os.SEEK_END)
    lines = file.read().decode(errors="replace").split("\n")
    return [line for each in lines if (line := each.strip())]


# --- the process of a Child -----------------------------------------------------------------------


def serve(calls: socket.socket, modules: Sequence[str], prepare: Sequence[Any] | None) -> None:
    """Serve calls until the parent closes the socket or ends. Then kill what still runs."""
    for module in modules:
        import_module(module)
    inherited = () if prepare is None else (resolve_name(prepare[0])(*prepare[1:]),)
    forked: dict[int, socket.socket] = {}
    while True:
        calls.settimeout(POLL_S if forked else None)
        with suppress(TimeoutError):
            _, numbers, *_ = socket.recv_fds(calls, 1, 2)
            if not numbers:
                break
            connection = socket.socket(fileno=numbers[1])
            with open(numbers[0]) as request:
                if prepare is None:
                    answer(request, connection)
                elif pid := os.fork():
                    forked[pid] = connection
                else:
                    calls.close()
                    answer(request, connection, *inherited)
                    os._exit(0)
        forked = {pid: call for pid, call in forked.items() if not _has_ended(pid, call)}
    for pid, connection in forked.items():
        connection.close()
        os.kill(pid, signal.SIGKILL)


def _has_ended(pid: int, connection: socket.socket) -> bool:
    """Reap a forked process if it has ended. Kill it if the caller has closed the connection."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        with connection, suppress(OSError):
            connection.sendall(b'\n{"code": %d}\n' % os.waitstatus_to_exitcode(status))
    elif select.select([connection], [], [], 0)[0]:
        os.kill(pid, signal.SIGKILL)
    return bool(ended)


def answer(request: IO[str], connection: socket.socket, *inherited: Any) -> None:
    """Run a call in this process, within limits that hold even if the parent process dies."""
    with connection:
        work, arguments, values = json.load(request)
        work, limits = resolve_name(work), Limits(*values)
        os.nice(limits.nice)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        signal.alarm(ceil(limits.wall_s) + 1)
        if not inherited:  # threads of a forked process may reserve large stacks
            limit = psutil.Process().memory_info().vms + ADDRESSES_PER_BYTE * limits.memory_bytes
            with suppress(ValueError, OSError):
                hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
                resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))
        connection.sendall(b'{"pid": %d}\n' % os.getpid())
        try:
            result = json.dumps({"result": work(*inherited, *arguments)}, default=asdict)
        except MemoryError:
            os._exit(NO_MEMORY_CODE)
        except BaseException:
            os._exit(1)
        connection.sendall(result.encode() + b"\n")
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=int(sys.argv[1])) as calls:
        serve(calls, *json.load(sys.stdin))
