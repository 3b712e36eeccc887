"""Statistics of several engines."""

from dataclasses import replace

from engine.figures import Histogram
from engine.types import CellStats, Distributions, EngineStats, KVStats, MissReason, MlxMemory
from server.cluster.membership import ended, merged

POOL = KVStats(
    **{name: 2 for name in KVStats.__dataclass_fields__ if name != "cells"},
    cells=CellStats(4, 1, 1, (("kept", 2),), 0, 3, 100, 400),
)


def seen(value: float) -> Distributions:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    return Distributions(step_seconds=histogram.snapshot)


ONE = EngineStats(
    running=1,
    steps=10,
    token_budget=64,
    step_seconds=0.5,
    prefix_misses=((MissReason.EVICTED, 2),),
    measured=seen(0.5),
    mlx=MlxMemory(1, 2, 3),
    kv=POOL,
)


def test_counts_are_added_and_what_is_no_sum_is_the_largest() -> None:
    other = replace(ONE, token_budget=32, measured=seen(1.5))
    both = merged([ONE, other])
    assert (both.running, both.steps, both.token_budget, both.step_seconds) == (2, 20, 64, 0.5)
    assert both.prefix_misses == ((MissReason.EVICTED, 4),)
    assert both.measured.step_seconds.counts == (1, 1, 0)
    assert both.measured.step_seconds.total == 2.0
    assert both.mlx == MlxMemory(2, 4, 6)
    assert both.kv is not None
    assert (both.kv.free_bytes, both.kv.block_bytes) == (4, 2)
    assert both.kv.cells == CellStats(8, 2, 2, (("kept", 4),), 0, 6, 100, 800)


def test_of_an_engine_that_is_gone_its_counters_are_left() -> None:
    left = ended(ONE)
    assert (left.steps, left.running, left.kv) == (10, 0, None)
    assert merged([left]).steps == 10
    assert merged([]) == EngineStats()
