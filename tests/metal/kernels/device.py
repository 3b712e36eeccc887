"""A library of compiled kernels, and the structs that they take (kernels/metal/arguments.h)."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROW_ENTRY = np.dtype([("base", "u8"), ("position", "u4"), ("first_page", "u4")])
PLACE = [
    *(("key_offset", "u8"), ("value_offset", "u8")),
    *(("row_bytes", "u4"), ("block_shift", "u4")),
]
DECODE_TASK = np.dtype([("row", "u4"), ("split", "u4")])
ATTENTION = np.dtype(
    [
        *(*PLACE, ("query_heads", "u4"), ("kv_heads", "u4"), ("first_row", "u4"), ("scale", "f4")),
        *(("softcap", "f4"), ("window", "u4"), ("sinks", "u4"), ("unused", "u4")),
    ]
)
APPEND = np.dtype([*PLACE, ("row_elements", "u4"), ("rows", "u4")])
PROJECT = np.dtype(
    [
        *(*PLACE, ("query_heads", "u4"), ("kv_heads", "u4"), ("rows", "u4")),
        *(("normed", "u4"), ("turned", "u4"), ("eps", "f4"), ("magnitude", "f4")),
        *(("unused", "u4"), ("frequencies", "f4", 128)),
    ]
)
GATHER = np.dtype(
    [*PLACE, ("row_elements", "u4"), ("tokens", "u4"), ("row", "u4"), ("first", "u4")]
)
SWIGLU = np.dtype([("elements", "u4"), ("gate", "u4")])
PRODUCT = np.dtype(
    [
        *(("inputs", "u4"), ("rows", "u4"), ("matrices", "u4"), ("group_shift", "u4")),
        *(("added", "u4"), ("residual", "u4"), ("gate", "u4"), ("unused", "u4")),
        *(("outputs", "u4", 4), ("first_tiles", "u4", 4)),
    ]
)
BLOCK = np.dtype(
    [
        *(("source", "u8"), ("target", "u8"), ("source_stride", "u8"), ("target_stride", "u8")),
        *(("bytes", "u8"), ("regions", "u4"), ("unused", "u4")),
    ]
)
DELTA_SEGMENT = np.dtype(
    [
        *(("read", "u8"), ("reads", "u4"), ("first", "u4"), ("count", "u4")),
        *(("first_write", "u4"), ("writes", "u4"), ("unused", "u4")),
    ]
)
DELTA_WRITE = np.dtype([("slot", "u8"), ("rows", "u4"), ("unused", "u4")])
DELTA = np.dtype(
    [
        *(("offset", "u8"), ("key_heads", "u4"), ("value_heads", "u4"), ("tail_rows", "u4")),
        *(("segments", "u4"), ("eps", "f4"), ("rows", "u4")),
    ]
)
ROUTE = np.dtype(
    [
        *(("rows", "u4"), ("experts", "u4"), ("chosen", "u4")),
        *(("normalised", "u4"), ("shared", "u4"), ("tiles", "u4")),
    ]
)
EXPERT_TILE = np.dtype([("expert", "u4"), ("first", "u4"), ("count", "u4"), ("unused", "u4")])
EXPERTS = np.dtype(
    [
        *(("inputs", "u4"), ("outputs", "u4"), ("stride", "u4"), ("experts", "u4")),
        *(("pairs", "u4"), ("chosen", "u4"), ("group_shift", "u4"), ("added", "u4")),
        *(("gate", "u4"), ("unused", "u4")),
    ]
)
MIX = np.dtype([("hidden", "u4"), ("rows", "u4"), ("chosen", "u4"), ("shared", "u4")])
SPLIT_TOKENS, SHORT_SPLIT_TOKENS, SHORT_ROW_TOKENS = 256, 128, 2048
MOST_TILE_HEADS = 8
SWIGLU_NUMBERS = 4
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


def struct(dtype: np.dtype[Any], *values: Any) -> NDArray[Any]:
    """One struct with these members, in order."""
    return np.array([values], dtype=dtype)


def library_path() -> Path:
    """What the Makefile has built and names in MSL_LIBRARY."""
    return Path(os.environ["MSL_LIBRARY"])
