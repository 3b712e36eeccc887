"""The limits of this machine: how fast it reads memory, and how much other programs take of it."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

BUILD = Path(__file__).parents[2] / "build" / "bench"
COMPILER_OPTIONS = ("-O3", "-std=c++20", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 120.0


class CompilerError(OSError):
    """A library of the benchmark's cannot be compiled; the message is a sentence."""


def compiled(folder: Path, options: Sequence[str]) -> Path:
    """Compile a folder's sources into one library, once for each text and each set of options.
    Raises CompilerError."""
    texts = [file.read_bytes() for file in sorted(folder.iterdir())]
    text = b"".join([*texts, " ".join((*COMPILER_OPTIONS, *options)).encode()])
    file = BUILD / f"{folder.name}-{hashlib.sha256(text).hexdigest()[:16]}.{sys.platform}"
    if not file.exists():
        _compile(file, sorted(folder.glob("*.cpp")), options)
    return file


def _compile(file: Path, sources: Sequence[Path], options: Sequence[str]) -> None:
    """Write the library whole or not at all: others may compile at the same time."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        raise CompilerError(f"no C++ compiler of {', '.join(names)}: set CXX")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [compiler, *COMPILER_OPTIONS, "-o", str(made), *map(str, sources), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if done.returncode != 0:
            raise CompilerError(f"{file.stem} does not compile:\n{done.stderr}")
        made.replace(file)


NATIVE = Path(__file__).parent / "native"
OPTIONS = ("-Wno-psabi", "-ffp-contract=fast", "-pthread")
# More than last-level caches hold, those of servers too, which a virtual machine has a part of.
MEMORY_BYTES = 1024**3
# Ways that are slower than this part of the best one in a first pass are not tried again.
PROMISING = 0.8
PASSES = 3
CALM_CORES = 0.1


def read_bandwidth_text(threads: int) -> str:
    """Measure now. Raises CompilerError without a compiler."""
    with ReadProbe(MEMORY_BYTES, threads) as probe:
        return f"{probe.best_bytes_per_s() / 1e9:.1f} GB/s of {MEMORY_BYTES >> 20} MiB"


class ReadProbe:
    """Memory that all threads read once per pass; a context manager, because it is large.

    There are several ways to read: streams per thread, and how far ahead memory is asked for. The
    first look tries all of them; the later ones only those that came near the best.
    """

    def __init__(self, size_bytes: int, threads: int) -> None:
        self._native = library()
        self._threads = threads
        self._memory = self._native.read_probe_new(size_bytes)
        if not self._memory:
            raise MemoryError(f"no {size_bytes} bytes of memory to read")
        self.size_bytes: int = self._native.read_probe_bytes(self._memory)
        self._ways = list(range(self._native.read_ways()))
        self._best_s: dict[int, float] = defaultdict(lambda: float("inf"))

    def __enter__(self) -> "ReadProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self._native.read_probe_free(self._memory)
        self._memory = None

    def best_bytes_per_s(self) -> float:
        return max(self._pass_bytes_per_s() for _ in range(PASSES))

    def _pass_bytes_per_s(self) -> float:
        seconds = {way: self._pass(way) for way in self._ways}
        for way, took_s in seconds.items():
            self._best_s[way] = min(self._best_s[way], took_s)
        fastest_s = min(self._best_s[way] for way in self._ways)
        self._ways = [way for way in self._ways if self._best_s[way] * PROMISING <= fastest_s]
        return self.size_bytes / min(seconds.values())

    def _pass(self, way: int) -> float:
        total = ctypes.c_uint64()
        seconds: float = self._native.read_probe_pass(
            self._memory, way, self._threads, ctypes.byref(total)
        )
        return seconds


@cache
def library() -> ctypes.CDLL:
    native = ctypes.CDLL(str(compiled(NATIVE, OPTIONS)))
    size, seconds, pointer = ctypes.c_size_t, ctypes.c_double, ctypes.c_void_p
    signatures: dict[str, tuple[type, list[type]]] = {
        "read_ways": (size, []),
        "read_probe_new": (pointer, [size]),
        "read_probe_bytes": (size, [pointer]),
        "read_probe_pass": (seconds, [pointer, size, size, pointer]),
        "read_probe_free": (ctypes.c_int, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(native, name)
        function.restype, function.argtypes = result, arguments
    return native


@dataclass(frozen=True, slots=True)
class Busy:
    """Processor seconds so far."""

    at_s: float
    machine_s: float
    """On all cores: of every process, of interrupts, and time that the hypervisor gave away."""
    ours_s: float
    """Of this process and its descendants that still run."""

    @classmethod
    def now(cls) -> "Busy":
        times = psutil.cpu_times()._asdict()
        # The time of guests is in user and nice already.
        idle = sum(times.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        this = psutil.Process()
        ours_s = 0.0
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                ours_s += sum(process.cpu_times()[:2])
        return cls(time.monotonic(), sum(times.values()) - idle, ours_s)

    def others_since(self, before: "Busy") -> float:
        """Return how many cores other programs took, on average."""
        others_s = (self.machine_s - before.machine_s) - (self.ours_s - before.ours_s)
        return max(0.0, others_s / (self.at_s - before.at_s))


def others_text(cores: float) -> str:
    """cores: the most that other programs took in a round."""
    advice = "" if cores <= CALM_CORES else ": NOT CALM, run it again"
    return f"at most {100 * cores:.0f} % of one core{advice}"
