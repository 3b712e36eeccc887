"""The statistics of several engines as those of one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

from engine.types import CellStats, Distributions, EngineStats, HistogramCounts, KVStats, MissReason
from engine.types import MlxMemory as MlxMemory

# What is of the newest step, and no sum.
NO_SUMS = ("token_budget", "step_seconds")
# What ends with its engine; all else counts what has happened.
OF_THE_MOMENT = ("running", "waiting", "token_budget", "step_seconds", "mlx", "kv")
SAME_IN_ALL = ("block_bytes", "block_tokens", "cells")


def ended(stats: EngineStats) -> EngineStats:
    """Return what is left of an engine that is gone: its counters."""
    nothing = EngineStats()
    return replace(stats, **{name: getattr(nothing, name) for name in OF_THE_MOMENT})


def merged(all_stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sums; of what is no sum the largest."""
    if not all_stats:
        return EngineStats()
    sums = {
        each.name: sum(getattr(stats, each.name) for stats in all_stats)
        for each in fields(EngineStats)
        if each.type in (int, float, "int", "float")
    }
    largest = {name: max(getattr(stats, name) for stats in all_stats) for name in NO_SUMS}
    return replace(
        EngineStats(),
        **sums | largest,
        prefix_misses=_misses(all_stats),
        measured=_measured([stats.measured for stats in all_stats]),
        mlx=MlxMemory(*map(sum, zip(*(stats.mlx for stats in all_stats), strict=True))),
        kv=_pool([stats.kv for stats in all_stats if stats.kv is not None]),
    )


def _misses(all_stats: Sequence[EngineStats]) -> tuple[tuple[MissReason, int], ...]:
    counts = Counter[MissReason]()
    for stats in all_stats:
        counts.update(dict(stats.prefix_misses))
    return tuple(counts.items())


def _measured(all_measured: Sequence[Distributions]) -> Distributions:
    return Distributions(*(_histogram(same) for same in zip(*all_measured, strict=True)))


def _histogram(same: Sequence[HistogramCounts]) -> HistogramCounts:
    counts = tuple(map(sum, zip(*(its.counts for its in same), strict=True)))
    return HistogramCounts(same[0].bounds, counts, sum(its.total for its in same))


def _pool(pools: Sequence[KVStats]) -> KVStats | None:
    if not pools:
        return None
    sums = {
        each.name: sum(getattr(pool, each.name) for pool in pools)
        for each in fields(KVStats)
        if each.name not in SAME_IN_ALL
    }
    return replace(pools[0], **sums, cells=_cells([pool.cells for pool in pools]))


def _cells(pools: Sequence[CellStats]) -> CellStats:
    cached = Counter[str]()
    for pool in pools:
        cached.update(dict(pool.cached))
    sums = {
        each.name: sum(getattr(pool, each.name) for pool in pools)
        for each in fields(CellStats)
        if each.name not in ("cached", "cell_bytes")
    }
    return replace(pools[0], **sums, cached=tuple(cached.items()))
