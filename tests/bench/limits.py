"""The machine's own limits, as rulers: how fast it reads memory, and how fast it multiplies."""

import ctypes
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tests.bench.compiler import compiled
from tests.bench.peers import BrokenError

NATIVE = Path(__file__).parent / "native"
OPTIONS = ("-Wno-psabi", "-ffp-contract=fast", "-pthread")
# More than last-level caches hold, those of servers too, which a virtual machine has a part of.
MEMORY_BYTES = 1024**3
# Ways that are slower than this part of the best one in a first pass are not tried again.
PROMISING = 0.8
ARITHMETIC_S = 0.3
MATRIX_SIZE = 1536


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Per second, of all threads together."""

    read_bytes: float
    float32_flop: float
    """Multiply-adds that never leave the registers."""
    bfloat16_flop: float
    """The same, of the processor's products of bfloat16; 0 where it has none."""
    product_flop: float
    """numpy's BLAS on float32 matrices."""

    def facts(self) -> list[tuple[str, str]]:
        """In words."""
        brain = f"{self.bfloat16_flop / 1e9:.0f} bfloat16" if self.bfloat16_flop else "no bfloat16"
        return [
            ("read bandwidth", f"{self.read_bytes / 1e9:.1f} GB/s of {MEMORY_BYTES >> 20} MiB"),
            (
                "matrix rate",
                f"{self.product_flop / 1e9:.0f} GFLOP/s of float32 by numpy's BLAS; in registers "
                f"{self.float32_flop / 1e9:.0f} float32, {brain}",
            ),
        ]


def measure_limits(threads: int, passes: int) -> MachineLimits:
    """The best of some passes of each. Raises CompilerError without one."""
    native = library()
    with ReadProbe(MEMORY_BYTES, threads) as probe:
        read_bytes = max(probe.bytes_per_s() for _ in range(passes))
    return MachineLimits(
        read_bytes,
        native.float32_flop_per_s(threads, ARITHMETIC_S),
        native.bfloat16_flop_per_s(threads, ARITHMETIC_S),
        max(product_flop_per_s(MATRIX_SIZE) for _ in range(passes)),
    )


def product_flop_per_s(size: int) -> float:
    """Of one product of square matrices, with the threads that numpy's BLAS takes by itself."""
    left, right = (np.full((size, size), n, dtype=np.float32) for n in (1, 2))
    started_s = time.perf_counter()
    result = left @ right
    seconds = time.perf_counter() - started_s
    assert result[-1, -1] == 2 * size
    return 2 * size**3 / seconds


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
            raise BrokenError(f"no {size_bytes} bytes of memory to read")
        self.size_bytes: int = self._native.read_probe_bytes(self._memory)
        self.sums: set[int] = set()
        """All words, xored, of each pass: one number, or a way has left something out."""
        self._ways = list(range(self._native.read_ways()))
        self._best_s: dict[int, float] = defaultdict(lambda: float("inf"))

    def __enter__(self) -> "ReadProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self._native.read_probe_free(self._memory)
        self._memory = None

    def bytes_per_s(self) -> float:
        """Of the fastest way that is left, one pass of each."""
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
        self.sums.add(total.value)
        return seconds


# --- the native part -----------------------------------------------------------------------------


@cache
def library() -> ctypes.CDLL:
    """The folder native."""
    native = ctypes.CDLL(str(compiled(NATIVE, OPTIONS)))
    size, seconds, pointer = ctypes.c_size_t, ctypes.c_double, ctypes.c_void_p
    signatures: dict[str, tuple[type, list[type]]] = {
        "read_ways": (size, []),
        "read_probe_new": (pointer, [size]),
        "read_probe_bytes": (size, [pointer]),
        "read_probe_pass": (seconds, [pointer, size, size, pointer]),
        "read_probe_free": (ctypes.c_int, [pointer]),
        "float32_flop_per_s": (seconds, [size, seconds]),
        "bfloat16_flop_per_s": (seconds, [size, seconds]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(native, name)
        function.restype, function.argtypes = result, arguments
    return native
