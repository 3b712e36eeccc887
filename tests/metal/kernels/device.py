"""A library of compiled kernels, and the structs that they take (kernels/metal/arguments.h)."""

import ctypes
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER = (Path(__file__).parents[3] / "metal_ext/kernels/metal/arguments.h").read_text()
TYPES = {"uint32_t": "u4", "uint64_t": "u8", "float": "f4"}
SPLIT_TOKENS, SHORT_SPLIT_TOKENS, SHORT_ROW_TOKENS = 256, 128, 2048
MOST_TILE_HEADS = 8
DECODE_THREADS = 256
PRODUCT_THREADS, PRODUCT_OUTPUTS, GATE_OUTPUTS = 64, 8, 4
ROUTE_THREADS, TILE_ROWS, MAX_PAIRS = 256, 4, 1024

Buffer = NDArray[Any] | int
Grid = Sequence[int]


class Device:
    """Launches kernels of one shared library (tests/metal/msl/launch.h)."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def threadgroups(self, name: str, buffers: Sequence[Buffer], grid: Grid, threads: Grid) -> None:
        """Runs ``grid`` threadgroups. Buffers are arrays, written in place, or addresses."""
        self._launch(f"launch_{name}", buffers, grid, threads)

    def threads(self, name: str, buffers: Sequence[Buffer], grid: Grid, threads: Grid) -> None:
        """Runs ``grid`` threads; threadgroups at its edges are cut."""
        self._launch(f"launch_threads_{name}", buffers, grid, threads)

    def set_order(self, seed: int) -> None:
        """Of threadgroups and simdgroups; 0 is ascending."""
        self._library.msl_set_order(ctypes.c_uint(seed))

    def _launch(self, function: str, buffers: Sequence[Buffer], grid: Grid, threads: Grid) -> None:
        addresses = [b if isinstance(b, int) else b.ctypes.data for b in buffers]
        getattr(self._library, function)(
            (ctypes.c_void_p * len(addresses))(*addresses), _sizes(grid), _sizes(threads)
        )


def _sizes(sizes: Grid) -> Any:
    return (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))


def split_tokens(position: int) -> int:
    """Of the splits of a row that ends at that position."""
    return SHORT_SPLIT_TOKENS if SPLIT_TOKENS <= position < SHORT_ROW_TOKENS else SPLIT_TOKENS


def tile_heads(group: int) -> int:
    """Of query heads that share a KV head: in as few tiles as can be, and then small ones."""
    heads = -(-group // -(-group // MOST_TILE_HEADS))
    return next(size for size in (4, 6, 8) if size >= heads)


def members(name: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield those of a struct, and of the struct in it."""
    (text,) = re.findall(rf"^struct {name} \{{(.*?)^\}};", HEADER, re.MULTILINE | re.DOTALL)
    line = re.compile(r"^  (\w+) (\w+)(?:\[(\w+)(?: / (\d))?\])?;", re.MULTILINE)
    for kind, member, count, divisor in line.findall(text):
        counts = re.findall(rf"\b{count} = (\d+)", HEADER) if count else []
        shape = tuple(int(each) // int(divisor or 1) for each in counts)
        yield from [(member, TYPES[kind], shape)] if kind in TYPES else members(kind)


@cache
def dtype(name: str) -> np.dtype[Any]:
    return np.dtype([*members(name)])


def struct(name: str, *values: Any) -> NDArray[Any]:
    """One struct of that name with these members, in order."""
    return np.array([values], dtype=dtype(name))


def library_path() -> Path:
    """What the Makefile has built and names in MSL_LIBRARY."""
    return Path(os.environ["MSL_LIBRARY"])
