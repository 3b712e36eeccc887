import pytest

from server.generation import Delta
from tests.server.protocol.finished import USAGE, report, text_answer
from tests.server.text.calling import said


@pytest.mark.parametrize("streamed", [True, False])
def test_the_offsets_of_a_text_count_within_its_own_choice(streamed: bool) -> None:
    answer = text_answer(choices=2)
    deltas = [
        Delta([said("bc")], [report(3, -1.0)], index=0),
        Delta([said("a")], [report(0, -1.0)], index=1),
        Delta([said("a")], [report(0, -1.0)], finish="stop", index=0),
        Delta([said("a")], [report(0, -1.0)], finish="length", index=1),
    ]
    if streamed:
        found: list[list[int]] = [[], []]
        for chunk in (chunk for delta in deltas for chunk in answer.chunks(delta)):
            (choice,) = chunk["choices"]
            found[choice["index"]] += choice["logprobs"]["text_offset"]
    else:
        for delta in deltas:
            answer.add(delta)
        choices = answer.whole(USAGE)["choices"]
        assert [choice["text"] for choice in choices] == ["bca", "aa"]
        assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]
        found = [choice["logprobs"]["text_offset"] for choice in choices]
    assert found == [[0, 2], [0, 1]]


def test_a_text_has_no_first_chunk_and_says_why_it_ended_with_its_last_text() -> None:
    answer = text_answer()
    assert answer.first_chunks() == []
    (chunk,) = answer.chunks(Delta([said("a"), said("b")], finish="stop"))
    assert chunk["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}
    ]


@pytest.mark.parametrize("streamed", [True, False])
def test_log_probabilities_of_a_text_are_parallel_lists(streamed: bool) -> None:
    answer = text_answer()
    deltas = [
        Delta([said("abc")], [report(0, -0.5, (3, -0.1)), report(3, -1.0)]),
        Delta([], []),
        Delta([said("a")], [report(0, -2.0)], finish="length"),
    ]
    if streamed:
        chunks = [chunk for delta in deltas for chunk in answer.chunks(delta)]
        lists = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        found = {name: [x for part in lists for x in part[name]] for name in lists[0]}
    else:
        for delta in deltas:
            answer.add(delta)
        (choice,) = answer.whole(USAGE)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abca", "length")
        found = choice["logprobs"]
    assert found == {
        "tokens": ["a", "bc", "a"],
        "token_logprobs": [-0.5, -1.0, -2.0],
        "top_logprobs": [{"bc": -0.1}, {}, {}],
        "text_offset": [0, 1, 3],
    }


def test_a_whole_text_without_log_probabilities_has_none() -> None:
    answer = text_answer()
    answer.add(Delta([said("a")], finish="stop"))
    assert answer.whole(USAGE)["choices"][0]["logprobs"] is None
