from dataclasses import replace

import pytest

from tests.bench.load import Answer, LoadResult
from tests.bench.peers import BrokenError
from tests.bench.serving import MAX_TOKENS, PROMPT_TOKENS, check_whole, streams_text

WHOLE = Answer(1.0, 3.0, (2.0,), PROMPT_TOKENS, MAX_TOKENS, "length", None)


def test_whole_answers_may_be_compared() -> None:
    check_whole("ours", LoadResult([WHOLE, WHOLE], 0.1), requests=2)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([WHOLE, replace(WHOLE, error="no answer")], "ours: 1 requests failed: no answer"),
        ([WHOLE], r"2 times \(86, 128\) .* not 1 times"),
        ([WHOLE, replace(WHOLE, completion_tokens=127)], r"\(86, 127\), \(86, 128\)"),
        ([WHOLE, replace(WHOLE, prompt_tokens=85)], r"\(85, 128\), \(86, 128\)"),
    ],
    ids=["an error", "one too few", "a short answer", "another prompt"],
)
def test_servers_that_do_different_work_are_not_compared(answers: list[Answer], says: str) -> None:
    with pytest.raises(BrokenError, match=says):
        check_whole("ours", LoadResult(answers, 0.1), requests=2)


def test_streams_are_counted_in_words() -> None:
    assert [streams_text(1), streams_text(8)] == ["1 stream", "8 streams"]
