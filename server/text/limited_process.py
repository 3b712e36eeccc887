"""Run functions on foreign files and programs in another process, with limits on time and memory.

``python -m server.text.limited_process MODULE...`` is the other process. It imports the modules and
reads requests: lines of JSON with a function of this code base, its arguments and its limits. The
process writes ``ready`` when the function's time starts, and then the result as a line of JSON. It
serves many calls, but after a call that exceeds a limit, the next call starts a new process."""

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from importlib import import_module
from math import ceil
from typing import Any, Self

import psutil

# The time limit for the start of the process, which mostly imports modules.
START_LIMIT_S = 60.0
POLL_S = 0.02
MAX_ANSWER_BYTES = 4 << 20
CHUNK_BYTES = 1 << 16
# The allowed addresses per allowed byte of memory. Libraries reserve more than they use.
ADDRESSES_PER_BYTE = 4
READY = b"ready\n"
NO_MEMORY_CODE = 12
# Environment variables that Python may need to start in the same way as this process.
KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
)


class LimitError(Exception):
    """Raised if a call in another process gives no result. The message is the reason."""

    def __init__(self, fault: str, *, begun: bool) -> None:
        """``begun`` is True if the failure came after the start of the called function."""
        super().__init__(fault)
        self.begun = begun


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of time and memory for one call."""

    seconds: float
    """The limit of the call's wall time, and also of its processor time."""
    memory_bytes: int


@dataclass(slots=True)
class LimitedProcess:
    """Calls functions in another process, which ``start`` or the first call starts."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the process, in addition to ``KEPT_VARIABLES``."""
    modules: Sequence[str] = ()
    """Modules that the process imports before the first call."""
    _process: "subprocess.Popen[bytes] | None" = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:
                self._process = None

    def call(self, limits: Limits, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``work`` with JSON values. If that fails, end the process and raise LimitError."""
        call = (work.__module__, work.__qualname__, arguments, astuple(limits))
        request = json.dumps(call, default=str).encode() + b"\n"
        try:
            return json.loads(self._answer(request, limits))
        except BaseException as error:
            self.__exit__()
            if isinstance(error, ValueError):
                raise LimitError("its process writes what is no JSON", begun=True) from error
            raise

    def start(self) -> None:
        """Start the process if it does not run. The process imports modules in the background."""
        if self._process is None:
            # Other variables may contain API keys. -P keeps modules of the working directory out.
            kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "server.text.limited_process", *self.modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**kept, **self.variables},
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)

    def _answer(self, request: bytes, limits: Limits) -> bytes:
        """Send a request and return the line with the result. Raises LimitError."""
        self.start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        watched, output, begun = psutil.Process(process.pid), bytearray(), False
        deadline = time.monotonic() + START_LIMIT_S
        with selectors.DefaultSelector() as pipes:
            pipes.register(process.stdout, selectors.EVENT_READ)
            pipes.register(process.stdin, selectors.EVENT_WRITE)
            while time.monotonic() < deadline:
                for key, _ in pipes.select(POLL_S):
                    if key.fileobj is process.stdin:
                        request = _sent(key.fd, request)
                        if not request:
                            pipes.unregister(process.stdin)
                        continue
                    more = os.read(key.fd, CHUNK_BYTES)
                    if not more:
                        raise LimitError(_end_of(process, limits), begun=begun)
                    output += more
                    if not begun and output.startswith(READY):
                        begun, deadline = True, time.monotonic() + limits.seconds
                        del output[: len(READY)]
                    if begun and output.endswith(b"\n"):
                        return bytes(output)
                    if len(output) > MAX_ANSWER_BYTES:
                        raise LimitError(_beyond_size(MAX_ANSWER_BYTES, "answers"), begun=begun)
                with suppress(psutil.Error):
                    if watched.memory_info().rss > limits.memory_bytes:
                        raise LimitError(_beyond_size(limits.memory_bytes, "memory"), begun=begun)
        raise LimitError(_beyond_time(limits.seconds if begun else START_LIMIT_S), begun=begun)


def _end_of(process: "subprocess.Popen[bytes]", limits: Limits) -> str:
    process.kill()
    code = process.wait()
    if code == -signal.SIGXCPU:
        return _beyond_time(limits.seconds)
    if code == NO_MEMORY_CODE:
        return _beyond_size(limits.memory_bytes, "memory")
    return f"its process ended with {code}"


def _sent(pipe: int, request: bytes) -> bytes:
    """Write as much as the pipe takes. Return the rest, or b"" if the process reads no more."""
    try:
        return request[os.write(pipe, request) :]
    except BrokenPipeError:
        return b""


def _beyond_time(seconds: float) -> str:
    return f"it takes more than {seconds:.0f} s"


def _beyond_size(size_bytes: int, what: str) -> str:
    return f"it takes more than {size_bytes >> 20} MiB of {what}"


def limit_this_process(limits: Limits) -> None:
    """Set the system's limits on this process. They hold even if the parent process dies."""
    own = psutil.Process()
    times, addresses = own.cpu_times(), own.memory_info().vms
    for kind, limit in (
        (resource.RLIMIT_CPU, ceil(times.user + times.system + limits.seconds)),
        (resource.RLIMIT_AS, addresses + ADDRESSES_PER_BYTE * limits.memory_bytes),
    ):
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))


def main() -> None:
    """Serve calls until standard input is closed."""
    for module in sys.argv[1:]:
        import_module(module)
    answers = sys.stdout.buffer
    for line in sys.stdin.buffer:
        module, function, arguments, limits = json.loads(line)
        work = getattr(import_module(module), function)
        limit_this_process(Limits(*limits))
        answers.write(READY)
        answers.flush()
        try:
            answer = json.dumps(work(*arguments)).encode()
        except MemoryError:
            sys.exit(NO_MEMORY_CODE)
        answers.write(answer + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
