from dataclasses import replace
from typing import Any

import pytest

from engine.types import MissReason, PrefixReport
from server.protocol.answers import Answer, usage_object
from server.text.pieces import Delta
from tests.server.protocol.finished import USAGE, chat_answer, report, text_answer
from tests.server.text.calling import said


def test_tokens_are_counted_and_add_up() -> None:
    assert usage_object(USAGE, cache_report=False) == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


@pytest.mark.parametrize(
    ("report", "cached", "miss"),
    [
        (None, 0, None),
        (PrefixReport(8, 8, None), 8, None),
        (
            PrefixReport(4, 5, MissReason.NEVER_CACHED),
            4,
            {"left_at": 5, "reason": "never_cached"},
        ),
        (PrefixReport(0, 0, MissReason.EVICTED), 0, {"left_at": 0, "reason": "evicted"}),
        (PrefixReport(0, 2, MissReason.NO_STATE), 0, {"left_at": 2, "reason": "no_state"}),
    ],
)
def test_what_came_from_the_cache_is_counted_and_the_rest_explained_on_request(
    report: PrefixReport | None, cached: int, miss: dict[str, Any] | None
) -> None:
    usage = replace(USAGE, prefix=report)
    plain, reported = usage_object(usage, False), usage_object(usage, True)
    assert plain["prompt_tokens_details"] == {"cached_tokens": cached}
    assert reported["prompt_tokens_details"] == {"cached_tokens": cached, "cache_miss": miss}


@pytest.mark.parametrize(("first_s", "rate"), [(None, None), (0.25, None), (0.25, 117.5)])
def test_times_are_told_on_request(first_s: float | None, rate: float | None) -> None:
    usage = replace(USAGE, first_token_s=first_s, tokens_per_s=rate)
    assert "timings" not in usage_object(usage, False)
    told = usage_object(usage, True)["timings"]
    assert told == {"first_token_s": first_s, "tokens_per_s": rate}


@pytest.mark.parametrize("make", [chat_answer, text_answer])
def test_the_report_is_in_a_stream_and_in_a_whole_answer(make: Any) -> None:
    usage = replace(USAGE, prefix=PrefixReport(4, 5, MissReason.EVICTED))
    answer = make(include_usage=True, cache_report=True)
    assert answer.last_chunks(usage)[0]["usage"] == usage_object(usage, True)
    assert answer.whole(usage)["usage"] == usage_object(usage, True)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(chat_answer(), "chat.completion.chunk"), (text_answer(), "text_completion")],
)
def test_every_chunk_says_which_answer_it_belongs_to(answer: Answer, kind: str) -> None:
    chunks = answer.chunks(Delta([said("a")], finish="stop"))
    for chunk in chunks:
        assert (chunk["id"], chunk["created"], chunk["model"]) == ("id-1", 123, "model-1")
        assert chunk["object"] == kind
        assert [choice["index"] for choice in chunk["choices"]] == [0]


@pytest.mark.parametrize("make", [chat_answer, text_answer])
def test_a_chunk_belongs_to_one_choice(make: Any) -> None:
    delta = Delta([said("a")], [report(0, -1.0)], finish="stop", index=2)
    chunks = make(choices=3).chunks(delta)
    assert chunks
    assert all([c["index"] for c in chunk["choices"]] == [2] for chunk in chunks)


def test_a_delta_without_anything_makes_no_chunk() -> None:
    assert chat_answer().chunks(Delta()) == []
    assert text_answer().chunks(Delta()) == []


@pytest.mark.parametrize("make", [chat_answer, text_answer])
def test_usage_comes_in_a_chunk_of_its_own_where_it_was_asked_for(make: Any) -> None:
    asked, silent = make(include_usage=True), make(include_usage=False)
    (chunk,) = asked.chunks(Delta([said("a")]))
    assert chunk["usage"] is None
    [last] = asked.last_chunks(USAGE)
    assert last["choices"] == []
    assert last["usage"] == usage_object(USAGE, False)
    (chunk,) = silent.chunks(Delta([said("a")]))
    assert "usage" not in chunk
    assert silent.last_chunks(USAGE) == []
