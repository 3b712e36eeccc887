"""Decode attention over a store, as the host runs it: splits, then their combination."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.metal.kernels import reference
from tests.metal.kernels.device import (
    DECODE_THREADS,
    Device,
    dtype,
    split_tokens,
    struct,
    tile_heads,
)
from tests.metal.kernels.formats import FLOAT, FORMATS, Floats, Format, Stored
from tests.metal.kernels.store import KVStore

Rows = Sequence[tuple[int, int]]  # (sequence, position)


@dataclass(frozen=True)
class Shape:
    """An instance of the kernels, and the heads of the model that runs it."""

    activations: str
    kv: str
    head_dim: int
    kind: str
    query_heads: int = 4
    kv_heads: int = 2
    window: int = 0
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()

    def __str__(self) -> str:
        heads = f"{self.query_heads}over{self.kv_heads}"
        return f"{self.activations}-{self.kv}-{self.head_dim}-{self.kind}-{heads}"

    @property
    def tile(self) -> int:
        """The heads of a tile."""
        return tile_heads(self.query_heads // self.kv_heads)

    @property
    def number(self) -> Format:
        return FORMATS[self.activations]

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))

    def store(self, lengths: Sequence[int]) -> KVStore:
        """An empty store for sequences of these lengths."""
        return KVStore(self.kind, lengths, self.kv_heads, self.head_dim, FORMATS[self.kv])


def filled(shape: Shape, lengths: Sequence[int], spread: float, seed: int = 0) -> KVStore:
    """A store of random rows; no value is beyond 3.5, keys are ``spread`` wide."""
    random = np.random.default_rng(seed)
    store = shape.store(lengths)
    for sequence, length in enumerate(lengths):
        rows = (length, shape.kv_heads, shape.head_dim)
        store.write(sequence, 0, random.normal(size=rows) * spread)
        store.write(sequence, 1, random.normal(size=rows).clip(-3.5, 3.5))
    return store


def random_queries(shape: Shape, rows: int, spread: float, seed: int = 1) -> Stored:
    """[rows][query_heads][head_dim], ``spread`` wide."""
    random = np.random.default_rng(seed)
    return shape.number.encode(
        random.normal(size=(rows, shape.query_heads, shape.head_dim)) * spread
    )


@dataclass(frozen=True)
class Splits:
    """The splits of all rows of a call: a task each, and where each row's begin."""

    tasks: np.ndarray[tuple[int], np.dtype[np.void]]
    first_task: np.ndarray[tuple[int], np.dtype[np.uint32]]

    @property
    def combined(self) -> NDArray[np.bool_]:
        """Of every row, whether it has several."""
        several: NDArray[np.bool_] = np.diff(self.first_task) > 1
        return several

    @classmethod
    def of(cls, rows: Rows, window: int = 0) -> "Splits":
        ends = [position - first_seen(position, window) for _, position in rows]
        counts = [end // split_tokens(end) + 1 for end in ends]
        tasks = [(row, split) for row, count in enumerate(counts) for split in range(count)]
        return cls(np.array(tasks, dtype("DecodeTask")), np.cumsum([0, *counts]).astype(np.uint32))


def first_seen(position: int, window: int) -> int:
    """0 is no window."""
    return max(0, position + 1 - window) if window else 0


def attend(
    device: Device, shape: Shape, store: KVStore, queries: Stored, rows: Rows, before: int = 0
) -> Stored:
    """Runs both kernels, the second where a row has several splits; queries and the result are
    [rows][query_heads][head_dim].

    before: entries of the row table that stand before the call's first, and are not to be read.
    """
    splits = Splits.of(rows, shape.window)
    table = np.concatenate([store.entries([rows[0]] * before), store.entries(rows)])
    table["base"][:before] = table["first_page"][:before] = 2**32 - 1
    heads = (shape.query_heads, shape.kv_heads)
    softmax = (shape.scale, shape.softcap, shape.window, bool(shape.sinks), 0)
    arguments = struct("AttentionArguments", *store.place, *heads, before, *softmax)
    sinks = np.array(shape.sinks or [np.nan], np.float32)
    # Each with room for one more, which must stay untouched.
    tasks = len(splits.tasks) + 1
    sums = FLOAT.nans(tasks, shape.query_heads, shape.head_dim)
    softened = FLOAT.nans(tasks, shape.query_heads, 2)
    out = shape.number.nans(len(rows) + 1, shape.query_heads, shape.head_dim)
    tiles = -(-shape.query_heads // shape.kv_heads // shape.tile)
    device.threadgroups(
        f"decode_split_{shape.activations}_{shape.kv}_{shape.head_dim}_{shape.tile}_{shape.kind}",
        [
            queries,
            splits.tasks,
            table,
            store.pages,
            store.arena,
            sums,
            softened,
            out,
            arguments,
            sinks,
        ],
        (shape.kv_heads * tiles, len(splits.tasks)),
        (DECODE_THREADS,),
    )
    check_written(shape.number.decode(out), ~splits.combined)
    if splits.combined.any():
        device.threadgroups(
            f"decode_combine_{shape.activations}_{shape.head_dim}",
            [sums, softened, splits.first_task, out, arguments, sinks],
            (shape.query_heads, len(rows)),
            (32,),
        )
    for parts in (FLOAT.decode(sums), FLOAT.decode(softened)):
        check_written(parts, splits.combined[splits.tasks["row"]])
    check_written(shape.number.decode(out), np.full(len(rows), True))
    return out[:-1]


def check_written(found: Floats, wanted: NDArray[np.bool_]) -> None:
    """Looks whether these of the results are there, and nothing else is, nor behind them."""
    assert not np.isnan(found[:-1][wanted]).any(), "a result is missing"
    assert np.isnan(found[:-1][~wanted]).all(), "a result is written that another kernel makes"
    assert np.isnan(found[-1]).all(), "more than the results is written"


def expected(shape: Shape, store: KVStore, queries: Stored, rows: Rows) -> Floats:
    """The same in float64."""
    results = []
    for row, (sequence, position) in enumerate(rows):
        seen = slice(first_seen(position, shape.window), position + 1)
        keys, values = (store.number.decode(store.rows(sequence, which)[seen]) for which in (0, 1))
        asked = shape.number.decode(queries[row])
        sinks = np.array(shape.sinks, np.float32) if shape.sinks else None
        results.append(reference.attention(asked, keys, values, shape.scale, shape.softcap, sinks))
    return np.array(results)
