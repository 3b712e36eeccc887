"""Every threat and every fault has a test that is named after it."""

import pytest

from tests.abuse import tables


def test_no_threat_and_no_fault_is_without_a_test() -> None:
    assert tables.missing() == []


def test_every_test_that_is_named_after_a_row_names_one_that_is_there() -> None:
    assert tables.unknown() == []


def test_a_row_without_a_test_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables.THREATS, 99, "something new")
    assert tables.missing() == [("threat", 99)]
    assert "threat 99: something new" in list(tables.described())


def test_what_does_not_apply_says_why() -> None:
    lines = list(tables.described())
    place = lines.index("threat 18: theft or poison of a cache on disk")
    assert lines[place + 1] == f"    does not apply: {tables.NO_DISK}"
