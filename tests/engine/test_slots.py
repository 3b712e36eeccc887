import pytest

from engine.client import Slots
from engine.types import QueueFullError, ShareFullError


def test_a_tenant_may_take_its_share_and_no_more() -> None:
    slots = Slots(0.5)
    slots.check(3, b"one", 6)
    slots.take(3, b"one")
    with pytest.raises(ShareFullError):
        slots.check(1, b"one", 6)
    slots.check(3, b"other", 6)
    slots.free(b"one")
    slots.check(1, b"one", 6)


def test_a_share_is_one_slot_at_least() -> None:
    assert Slots(0.01).max_share(10) == 1


def test_a_slot_is_freed_once() -> None:
    slots = Slots(1.0)
    slots.take(1, b"one")
    slots.free(b"one")
    with pytest.raises(AssertionError):
        slots.free(b"one")


def test_there_is_no_room_beyond_the_capacity_whoever_has_taken_it() -> None:
    slots = Slots(1.0)
    slots.take(2, b"one")
    slots.take(2, b"other")
    slots.check(2, b"one", 6)
    with pytest.raises(QueueFullError) as caught:
        slots.check(3, b"third", 6)
    assert not isinstance(caught.value, ShareFullError)
