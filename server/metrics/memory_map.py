"""GET /memory's body: what the engine's memory map says, small enough to be sent twice a second.

Blocks are numbered heap by heap: block b of heap h is ``h * blocks_per_heap + b``.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np
from pydantic_core import to_json

from engine.errors import EngineDeadError
from engine.memory_map import (
    BlockState,
    KVMap,
    MappedSequence,
    MemoryMap,
    SequenceReport,
)
from engine.serving import ServingEngine
from engine.types import KVStats

Json = dict[str, Any]
NOBODY = -1
LETTERS = {
    BlockState.FREE: "f",
    BlockState.OWNED: "o",
    BlockState.SEALED: "s",
    BlockState.QUARANTINED: "q",
    BlockState.CACHED: "c",
    BlockState.RELEASING: "r",
}
FREE_WITH_MEMORY = "d"
# Of the pool, and of each sequence.
GEOMETRY = (
    *("block_bytes", "tokens_per_block", "blocks_per_heap", "page_bytes", "regions", "max_heaps"),
)
BLOCKS = ("mapped_blocks", "sealed_blocks", "borrowed_blocks")
# Who looks within this time after another one is shown the same.
MAX_AGE_S = 0.1
# An engine that does not answer so long is in a long step, or stuck.
ENGINE_WAIT_S = 1.0


def encoded(found: MemoryMap) -> bytes:
    """Return the map as JSON. A few milliseconds for a pool of 100 000 blocks: for a worker
    thread."""
    return to_json(view(found))


def view(found: MemoryMap) -> Json:
    kv, stats = found.kv, found.stats
    mapped = {sequence.seq_id: sequence for sequence in kv.sequences}
    reports = chain(found.running, found.waiting)
    return {
        "geometry": {name: getattr(kv, name) for name in GEOMETRY},
        "pool": None if stats.kv is None else _pool(stats.kv),
        "shared_saved_bytes": 0 if stats.kv is None else stats.kv.shared_saved_bytes,
        "running": stats.running,
        "waiting": stats.waiting,
        "steps": stats.steps,
        "heaps": heap_letters(kv),
        # Numbers of sequences, in the order in which they came; "owners" counts places in it.
        "owner_ids": [sequence.seq_id for sequence in kv.sequences],
        "owners": owner_runs(kv),
        "sharers": sharer_runs(kv),
        "sequences": [_sequence(report, mapped.get(report.id)) for report in reports],
        "cells": [cell._asdict() for cell in kv.cells],
    }


def _pool(kv: KVStats) -> Json:
    return asdict(kv) | {"cells": asdict(kv.cells) | {"cached": dict(kv.cells.cached)}}


def heap_letters(kv: KVMap) -> list[str]:
    """Return a string for each heap, with a letter for each block: f free, d free with memory of
    the system, o owned, s sealed, q quarantined, c cached, r releasing."""
    table = np.zeros((2, len(BlockState)), np.uint8)
    for state, letter in LETTERS.items():
        table[:, state] = ord(letter)
    table[1, BlockState.FREE] = ord(FREE_WITH_MEMORY)
    dirty, states = (
        np.frombuffer(b"".join(parts), np.uint8)
        for parts in ((heap.dirty for heap in kv.heaps), (heap.states for heap in kv.heaps))
    )
    letters, size = table[dirty, states].tobytes().decode(), kv.blocks_per_heap
    return [letters[first : first + size] for first in range(0, len(letters), size)]


def owner_runs(kv: KVMap) -> list[int]:
    """Return who has the blocks, the first sequence where several do: ``[owner, count, owner,
    count, ...]`` over all blocks. -1: no open sequence."""
    owners = np.full(len(kv.heaps) * kv.blocks_per_heap, NOBODY, np.int32)
    for number in reversed(range(len(kv.sequences))):
        mine = kv.sequences[number].runs
        # A flat list of numbers is read several times as fast as a list of tuples.
        runs = np.fromiter(chain.from_iterable(mine), np.intp, 3 * len(mine)).reshape(-1, 3)
        firsts, counts = runs[:, 0] * kv.blocks_per_heap + runs[:, 1], runs[:, 2]
        # [first, first + 1, ...] of each run, one run after the other.
        ends = np.cumsum(counts)
        owners[np.arange(counts.sum()) + np.repeat(firsts - ends + counts, counts)] = number
    starts, counts = _runs(owners)
    return _flat(owners[starts], counts)


def sharer_runs(kv: KVMap) -> list[int]:
    """Return blocks that more than one sequence has: ``[gap, count, sequences, gap, ...]``, where a
    gap is the blocks since the run before."""
    sharers = _sharers(kv)
    starts, counts = _runs(sharers)
    shared = sharers[starts] > 1
    starts, counts, sharers = starts[shared], counts[shared], sharers[starts][shared]
    ends_before = np.append(0, starts + counts)[: len(starts)]
    return _flat(starts - ends_before, counts, sharers)


def _sharers(kv: KVMap) -> np.ndarray:
    """Return how many open sequences have each block."""
    raw = b"".join(heap.sharers for heap in kv.heaps)
    return np.frombuffer(raw, np.uint16).astype(np.int32)


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where runs of equal values begin, and how long they are."""
    changes = np.flatnonzero(np.diff(values)) + 1
    starts = np.concatenate([np.zeros(min(1, len(values)), np.intp), changes])
    return starts, np.diff(np.append(starts, len(values)))


def _flat(*columns: np.ndarray) -> list[int]:
    """Return the rows of a table, one after the other."""
    numbers: list[int] = np.stack(columns, axis=1).ravel().tolist()
    return numbers


def _sequence(report: SequenceReport, mapped: MappedSequence | None) -> Json:
    """Return a sequence as JSON. mapped: None for one that waits."""
    return asdict(report) | {name: getattr(mapped, name, 0) for name in BLOCKS}


class MemoryMapCache:
    """The newest memory map, encoded. Event loop only."""

    def __init__(
        self,
        client: ServingEngine,
        *,
        wait_s: float = ENGINE_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """wait_s: how long the engine is waited for."""
        self._client = client
        self._wait_s = wait_s
        self._clock = clock
        self._asking: asyncio.Task[None] | None = None
        self._newest: tuple[bytes, float] | None = None

    async def get(self) -> tuple[bytes, float] | None:
        """Return the newest map as JSON, and its age in seconds: an old one where the engine does
        not answer in time or has ended; None where there has never been one."""
        if self._asking is None and self._age_s() > MAX_AGE_S and self._client.alive:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            # Whoever gives up leaves the question there: a stuck engine is asked only once.
            await asyncio.wait((self._asking,), timeout=self._wait_s)
        return None if self._newest is None else (self._newest[0], self._age_s())

    def _age_s(self) -> float:
        return float("inf") if self._newest is None else self._clock() - self._newest[1]

    async def _ask(self) -> None:
        try:
            with suppress(EngineDeadError):
                found = await self._client.memory_map()
                made_at = self._clock()
                self._newest = await asyncio.to_thread(encoded, found), made_at
        finally:
            self._asking = None
