from server.text.newest import Newest


def test_what_was_asked_for_last_stays() -> None:
    kept: Newest[str, int] = Newest(10)
    kept.keep("a", 1, 4)
    kept.keep("b", 2, 4)
    assert kept.find("a") == 1
    kept.keep("c", 3, 4)
    assert [kept.find(key) for key in "abc"] == [1, None, 3]


def test_a_value_takes_the_place_of_the_one_before() -> None:
    kept: Newest[str, int] = Newest(10)
    for value in range(100):
        kept.keep("a", value, 4)
    kept.keep("b", 2, 4)
    assert [kept.find(key) for key in "ab"] == [99, 2]


def test_what_does_not_fit_at_all_is_not_kept() -> None:
    kept: Newest[str, int] = Newest(10)
    kept.keep("b", 2, 10)
    assert kept.keep("a", 1, 11) == [("a", 1)]
    assert kept.find("a") is None
    assert kept.find("b") == 2


def test_what_made_room_is_told_and_the_size_falls() -> None:
    kept: Newest[str, int] = Newest(2)
    assert kept.keep("a", 1) == kept.keep("b", 2) == []
    assert kept.keep("c", 3) == [("a", 1)]
    assert (kept.pop("b"), kept.pop("b")) == (2, None)
    assert kept.size == 1
    assert (kept.pop_oldest(), kept.pop_oldest(), kept.size) == (True, False, 0)
