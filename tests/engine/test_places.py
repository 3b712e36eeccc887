import pytest

from engine.errors import QueueFullError, ShareFullError
from engine.places import Places


def test_a_tenant_may_take_its_share_and_no_more() -> None:
    places = Places(0.5)
    places.check(3, b"one", 6)
    places.take(3, b"one")
    with pytest.raises(ShareFullError):
        places.check(1, b"one", 6)
    places.check(3, b"other", 6)
    places.release(b"one")
    places.check(1, b"one", 6)


def test_without_a_place_the_share_does_not_matter() -> None:
    places = Places(1.0)
    places.take(6, b"one")
    with pytest.raises(QueueFullError) as caught:
        places.check(1, b"other", 6)
    assert type(caught.value) is QueueFullError


def test_a_share_is_one_place_at_least() -> None:
    assert Places(0.01).max_share(10) == 1


def test_a_place_is_given_back_once() -> None:
    places = Places(1.0)
    places.take(1, b"one")
    places.release(b"one")
    with pytest.raises(AssertionError):
        places.release(b"one")
