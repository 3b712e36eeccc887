"""How many replicas there are to be."""

import pytest

from server.cluster.scaling import ReplicaCounts


@pytest.mark.parametrize("text", ["1", "3", "1-4", "2-12"])
def test_counts_are_written_as_they_are_read(text: str) -> None:
    assert str(ReplicaCounts.read(text)) == text
    assert str(ReplicaCounts.read("2-2")) == "2"


@pytest.mark.parametrize("text", ["0", "-1", "1-", "many", "3-1", "1-0", ""])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"replicas are written|is the larger"):
        ReplicaCounts.read(text)


def test_there_are_no_more_than_there_is_room_for() -> None:
    assert ReplicaCounts(2, 5).within(3) == ReplicaCounts(2, 3)
    assert ReplicaCounts(2, 5).within(0) == ReplicaCounts(0, 0)
    assert ReplicaCounts(1, 2).grown(ReplicaCounts(0, 4)) == ReplicaCounts(1, 4)
