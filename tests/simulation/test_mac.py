"""An hour of a Mac whose system warns all along."""

from kvcache.memory_budget import GIB
from tests.simulation.mac import AVAILABLE_BYTES, PEOPLE, WORKING_SET_BYTES, mac_hour, mac_plan


def test_the_budget_is_the_working_sets_whatever_is_available() -> None:
    memory = mac_plan()
    taken = memory.demand.fixed_bytes + memory.kv_budget_bytes
    left = WORKING_SET_BYTES - taken
    assert 1.5 * GIB <= left < 1.5 * GIB + memory.layout.groups[0].heap_bytes
    assert taken > 2 * AVAILABLE_BYTES
    assert memory.warning is not None


def test_fault_25_an_hour_of_warnings_makes_nobody_wait_and_loses_no_prefix() -> None:
    counts = mac_hour()
    assert counts["most at once"] >= PEOPLE
    assert counts["prefix misses: evicted"] == 0
    assert counts["prefix hits"] > 0.9 * counts["requests"]
    assert counts["ends: length"] + counts["ends: stop"] == counts["requests"]
