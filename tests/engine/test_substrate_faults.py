import pytest

from engine.substrate_faults import SubstrateFaults
from kvcache.backend import BackendFailedError


def fail() -> None:
    raise BackendFailedError("no answer")


def test_a_fault_is_remembered_where_it_ends_the_engine_and_where_it_is_looked_for() -> None:
    told: list[str] = []
    faults = SubstrateFaults(fail, told.append)
    with pytest.raises(BackendFailedError), faults.noticed():
        fail()
    assert isinstance(faults.find(), BackendFailedError)
    assert told == ["serving failed: no answer"] * 2


def test_other_failures_are_none_of_the_substrates() -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match="own"), SubstrateFaults(fail, told.append).noticed():
        raise ValueError("a request's own")
    assert SubstrateFaults().find() is None
    assert told == []
