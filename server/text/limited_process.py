"""Run work on foreign files and programs in a process of its own, with little time and memory.

``python -m server.text.limited_process MODULE...`` is that process; it imports the modules first. A
call is a line of JSON: a function of this code base, its arguments and its limits. The answer is a
line of JSON behind the line ``ready``, which starts the call's time. A process takes call after
call; one that exceeds a limit is killed, and the next call starts another.
"""

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

# For starting, most of it imports.
START_LIMIT_S = 60.0
POLL_S = 0.02
MAX_ANSWER_BYTES = 4 << 20
CHUNK_BYTES = 1 << 16
# Programs and libraries reserve more addresses than they use.
ADDRESSES_PER_BYTE = 4
READY = b"ready\n"
# Exit status after a MemoryError.
NO_MEMORY_CODE = 12
# Variables that Python may need to start as this process did.
KEPT_VARIABLES = (
    "PATH",
    "HOME",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "PYTHONHOME",
    "PYTHONPATH",
)


class LimitError(Exception):
    """A call without an answer; the message tells the reason."""

    def __init__(self, fault: str, *, begun: bool) -> None:
        """begun: whether the call had begun, so that its own work is at fault."""
        super().__init__(fault)
        self.begun = begun


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call."""

    seconds: float
    """Of wall time, and of processor time."""
    memory_bytes: int


@dataclass(slots=True)
class LimitedProcess:
    """Calls functions in a process with limits. The process starts with the first call, or with
    ``start``."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the process's environment."""
    modules: Sequence[str] = ()
    """Imported before the first call."""
    _process: "subprocess.Popen[bytes] | None" = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:
                self._process = None

    def call(self, limits: Limits, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a module. Arguments and result must be JSON values. Raises LimitError,
        and has ended the process then."""
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
        """Start the process unless it runs. It imports its modules in the background."""
        if self._process is None:
            # The environment may have keys, and the working directory foreign modules.
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
        """Send a request and return its line of answer. Raises LimitError."""
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
    """Send as much as fits and return the rest; nothing where the process has closed its input."""
    try:
        return request[os.write(pipe, request) :]
    except BrokenPipeError:
        return b""


def _beyond_time(seconds: float) -> str:
    return f"it takes more than {seconds:.0f} s"


def _beyond_size(size_bytes: int, what: str) -> str:
    return f"it takes more than {size_bytes >> 20} MiB of {what}"


def limit_this_process(limits: Limits) -> None:
    """Limit this process from now on, where the system can, because its parent may have died."""
    own = psutil.Process()
    times, addresses = own.cpu_times(), own.memory_info().vms
    for kind, limit in (
        (resource.RLIMIT_CPU, ceil(times.user + times.system + limits.seconds)),
        (resource.RLIMIT_AS, addresses + ADDRESSES_PER_BYTE * limits.memory_bytes),
    ):
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))


def main() -> None:
    """Serve calls until the input is closed."""
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
