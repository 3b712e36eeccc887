"""What mapping points cost, on a clock."""

import pytest

from tests.metal.mapping_points import AGENT, CHAT, MOST_LOST, TIGHT_BYTES, Load, run

STEPS = 300


@pytest.mark.parametrize("load", [CHAT, AGENT], ids=lambda load: load.name)
def test_little_time_is_lost_at_mapping_points(load: Load) -> None:
    its = run(load, 8, 0.2e-3, STEPS, at_points=True)
    assert its.points > 0
    assert its.lost < MOST_LOST / 2


def test_where_there_is_room_nothing_is_unmapped() -> None:
    assert run(CHAT, 8, 0.2e-3, STEPS, at_points=True).unmaps == 0
    assert run(CHAT, 8, 0.2e-3, STEPS, at_points=False).unmaps > 0


def test_where_prefixes_are_evicted_blocks_are_unmapped_for_others() -> None:
    its = run(AGENT, 32, 0.2e-3, STEPS, at_points=True, kv_bytes=TIGHT_BYTES)
    assert its.unmaps > 0
    assert its.lost < MOST_LOST


def test_a_bundle_that_takes_longer_costs_more() -> None:
    short, long = (run(CHAT, 8, s, STEPS, at_points=True).lost for s in (0.2e-3, 20e-3))
    assert long > 2 * short
