from collections import Counter

import pytest

from tests.abuse.clients import Ending
from tests.abuse.crowd import Outcome, outcome_of, report


@pytest.mark.parametrize(
    ("received", "outcome"),
    [
        (b'HTTP/1.1 200 OK\r\n\r\n{"usage": 1}', "answered"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"id', "cut in the middle"),
        (b"HTTP/1.1 429 Too Many\r\nRetry-After: 1\r\n\r\n", "429 with Retry-After"),
        (b"HTTP/1.1 503 No\r\n\r\n", "503 without a time"),
        (b"HTTP/1.1 500 No\r\n\r\n", "status 500"),
        (b"", "closed without a word"),
    ],
)
def test_an_ending_is_told_in_a_few_words(received: bytes, outcome: str) -> None:
    assert outcome_of(Ending(received, 1.0)) == outcome
    assert outcome_of(Ending(received, 1.0, open_still=True)) == "left hanging"


def test_a_crowd_with_an_unknown_end_or_slow_streams_is_a_problem(
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = Outcome(Counter({"answered": 1, "429 with Retry-After": 2}), 10.0, 20.0, 1.0)
    assert report(good) == 0
    bad = Outcome(Counter({"left hanging": 1}), 10.0, 21.0, 1.0)
    assert len(bad.problems()) == 3
    assert report(bad) == 1
    assert "left hanging" in capsys.readouterr().out
