import pytest

from server.text.stop_strings import StopStrings


@pytest.mark.parametrize(
    ("stops", "pieces", "sent"),
    [
        (("END",), ["all of it"], ["all of it"]),
        (("END",), ["now END more"], ["now "]),
        (("END",), ["no", "w E", "N", "D", "x"], ["no", "w ", "", "", ""]),
        (("END",), ["E", "NE", "ND"], ["", "EN", ""]),
        (("END", "N"), ["EN", "D"], ["E", ""]),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", ""]),
        (("x", "abc"), ["abx"], ["ab"]),
        ((), ["any", "thing"], ["any", "thing"]),
    ],
)
def test_text_is_sent_up_to_the_first_stop_string(
    stops: tuple[str, ...], pieces: list[str], sent: list[str]
) -> None:
    stop = StopStrings(stops)
    assert [stop.feed(piece) for piece in pieces] == sent


def test_the_stop_string_that_is_complete_first_ends_the_answer() -> None:
    for pieces in (["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]):
        stop = StopStrings(("abcd", "c"))
        assert "".join(stop.feed(piece) for piece in pieces) == "ab"
        assert stop.matched == "c"


def test_of_two_that_are_complete_at_once_the_longer_one_counts() -> None:
    stop = StopStrings(("cd", "abcd"))
    assert stop.feed("xabcd") == "x"
    assert stop.matched == "abcd"


def test_what_was_held_back_comes_out_when_the_answer_ends_otherwise() -> None:
    stop = StopStrings(("END",))
    assert stop.feed("the EN") == "the "
    assert stop.matched is None
    assert stop.flush() == "EN"
    assert stop.flush() == ""


def test_nothing_comes_out_after_a_match() -> None:
    stop = StopStrings(("END",))
    stop.feed("END and")
    assert stop.feed("more") == ""
    assert stop.flush() == ""


def test_an_empty_stop_string_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        StopStrings(("",))
