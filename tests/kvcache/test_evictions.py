"""What is remembered of evictions."""

import pytest

from kvcache import evictions
from kvcache.evictions import Evictions


def test_each_eviction_is_reported_once_unless_it_has_come_back() -> None:
    kept = Evictions()
    for digest in (b"1", b"2", b"3"):
        kept.add(digest)
    kept.discard(b"2")
    assert kept.take_unreported() == [b"1", b"3"]
    assert kept.take_unreported() == []
    assert b"1" in kept


def test_of_very_many_the_newest_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictions, "REPORTED_EVICTIONS", 2)
    kept = Evictions()
    for number in range(5):
        kept.add(bytes([number]))
    assert kept.take_unreported() == [b"\x03", b"\x04"]
