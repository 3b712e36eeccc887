import pytest

from server.text.beginnings import longest_beginning


@pytest.mark.parametrize(
    ("text", "wanted", "length"),
    [
        ("", ("ab",), 0),
        ("a", ("ab",), 1),
        ("xa", ("ab",), 1),
        ("ax", ("ab",), 0),
        ("ab", ("ab",), 0),
        ("aba", ("ab",), 1),
        ("aab", ("aabx", "abyz"), 3),
        ("xab", ("abyz", "b"), 2),
        ("abab", ("ababc",), 4),
        ("b", ("b", "bc"), 1),
        ("a", ("b",), 0),
    ],
)
def test_the_longest_end_that_begins_something_longer_is_found(
    text: str, wanted: tuple[str, ...], length: int
) -> None:
    assert longest_beginning(text, *wanted) == length
