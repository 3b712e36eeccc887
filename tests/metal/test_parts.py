import pytest

from tests.metal.parts import part_of


def test_the_parts_are_the_whole() -> None:
    every = range(8)
    assert list(part_of(every, "1/1")) == list(every)
    assert list(part_of(every, "2/3")) == [1, 4, 7]
    assert sorted(n for k in (1, 2, 3) for n in part_of(every, f"{k}/3")) == list(every)
    assert part_of(every, "today/3") in [part_of(every, f"{k}/3") for k in (1, 2, 3)]


@pytest.mark.parametrize("which", ["0/3", "4/3", "", "today"])
def test_a_part_that_is_none_is_refused(which: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        part_of(range(8), which)
