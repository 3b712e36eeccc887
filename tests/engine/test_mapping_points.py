"""When sequences that run wait for those that are to join them."""

from typing import cast

from engine.step.pipeline import LONGEST_PATIENCE_S, PATIENCE, MappingPoints
from kvcache.manager import KVCacheManager
from tests.engine.step.test_scheduler import CountingKV
from tests.simulation.runner import Clock


def points() -> tuple[MappingPoints, CountingKV, Clock]:
    """With a cache that wants no point yet."""
    kv, clock = CountingKV(blocks=8), Clock()
    return MappingPoints(cast(KVCacheManager, kv), clock), kv, clock


def take(made: MappingPoints, kv: CountingKV, clock: Clock, seconds: float) -> None:
    """A point that takes so long."""
    kv.wants_mapping_point = True
    made.begin()
    kv.wants_mapping_point = False
    clock.now += seconds
    made.end()


def test_the_first_point_comes_at_once() -> None:
    made, kv, _ = points()
    assert not made.is_due()
    kv.wants_mapping_point = True
    assert made.is_due()


def test_whoever_wants_a_point_waits_so_much_longer_than_the_last_one_took() -> None:
    made, kv, clock = points()
    take(made, kv, clock, 0.001)
    kv.wants_mapping_point = True
    assert not made.is_due()
    clock.now += 0.9 * PATIENCE * 0.001
    assert not made.is_due()
    clock.now += 0.2 * PATIENCE * 0.001
    assert made.is_due()


def test_a_wish_that_was_granted_is_not_counted_again() -> None:
    made, kv, clock = points()
    take(made, kv, clock, 0.001)
    kv.wants_mapping_point = True
    assert not made.is_due()
    clock.now += 1.0
    take(made, kv, clock, 0.001)
    kv.wants_mapping_point = True
    assert not made.is_due()


def test_nobody_waits_longer_than_a_moment_however_long_the_last_point_took() -> None:
    made, kv, clock = points()
    take(made, kv, clock, 60.0)
    kv.wants_mapping_point = True
    assert not made.is_due()
    clock.now += 1.01 * LONGEST_PATIENCE_S
    assert made.is_due()


def test_a_break_that_nobody_asked_for_is_no_mapping_point() -> None:
    made, kv, clock = points()
    made.begin()
    clock.now += 60.0
    made.end()
    kv.wants_mapping_point = True
    assert made.is_due()
