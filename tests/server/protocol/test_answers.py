from dataclasses import replace
from typing import Any

import pytest

from engine.types import MissReason, PrefixReport, TokenLogprobs
from server.generation import Delta, TokenReport, Usage
from server.protocol.answers import ChatAnswer, Heading, TextAnswer, usage_object
from server.protocol.common import Wanted
from server.text.parser import Part, Piece

HEADING = Heading("id-1", 123, "model-1")
USAGE = Usage(prompt_tokens=10, completion_tokens=5, reasoning_tokens=2)
BYTES = {0: b"a", 1: b"\xc3", 2: b"\xa9", 3: b"bc"}


def thought(text: str) -> Piece:
    return Piece(Part.REASONING, text)


def said(text: str) -> Piece:
    return Piece(Part.CONTENT, text)


def report(token: int, logprob: float, *top: tuple[int, float]) -> TokenReport:
    return TokenReport(token, TokenLogprobs(logprob, top))


def chat_answer(**wanted: Any) -> ChatAnswer:
    return ChatAnswer(HEADING, BYTES.__getitem__, Wanted(**wanted))


def text_answer(**wanted: Any) -> TextAnswer:
    return TextAnswer(HEADING, BYTES.__getitem__, Wanted(**wanted))


def deltas_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]


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
        (PrefixReport(0, 2, MissReason.OTHER_SALT), 0, {"left_at": 2, "reason": "other_salt"}),
    ],
)
def test_what_came_from_the_cache_is_counted_and_the_rest_explained_on_request(
    report: PrefixReport | None, cached: int, miss: dict[str, Any] | None
) -> None:
    usage = replace(USAGE, prefix=report)
    plain, reported = usage_object(usage, False), usage_object(usage, True)
    assert plain["prompt_tokens_details"] == {"cached_tokens": cached}
    assert reported["prompt_tokens_details"] == {"cached_tokens": cached, "cache_miss": miss}


@pytest.mark.parametrize("make", [chat_answer, text_answer])
def test_the_report_is_in_a_stream_and_in_a_whole_answer(make: Any) -> None:
    usage = replace(USAGE, prefix=PrefixReport(4, 5, MissReason.EVICTED))
    answer = make(include_usage=True, cache_report=True)
    assert answer.last_chunk(usage)["usage"] == usage_object(usage, True)
    assert answer.whole(usage)["usage"] == usage_object(usage, True)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(chat_answer(), "chat.completion.chunk"), (text_answer(), "text_completion")],
)
def test_every_chunk_says_which_answer_it_belongs_to(
    answer: ChatAnswer | TextAnswer, kind: str
) -> None:
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


def test_every_choice_of_a_chat_begins_with_who_speaks() -> None:
    first = chat_answer(choices=3).first_chunks()
    assert [chunk["choices"][0]["index"] for chunk in first] == [0, 1, 2]
    assert deltas_of(first) == [{"role": "assistant", "content": ""}] * 3


def test_a_whole_chat_keeps_its_choices_apart() -> None:
    answer = chat_answer(choices=2)
    answer.add(Delta([said("A")], [report(0, -0.5)], index=1))
    answer.add(Delta([thought("b")], finish="length", index=0))
    answer.add(Delta([said("c")], [report(3, -0.25)], finish="stop", index=1))
    first, second = answer.whole(USAGE)["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert (first["message"]["content"], first["message"]["reasoning"]) == ("", "b")
    assert second["message"]["content"] == "Ac"
    assert (first["finish_reason"], second["finish_reason"]) == ("length", "stop")
    assert first["logprobs"] is None
    assert [entry["token"] for entry in second["logprobs"]["content"]] == ["a", "bc"]


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


def test_a_chat_begins_with_who_speaks_and_ends_with_why_it_ended() -> None:
    answer = chat_answer()
    assert deltas_of(answer.first_chunks()) == [{"role": "assistant", "content": ""}]
    chunks = answer.chunks(Delta([said("a")], finish="length"))
    assert deltas_of(chunks) == [{"content": "a"}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "length"]


def test_thoughts_go_out_under_both_names() -> None:
    chunks = chat_answer().chunks(Delta([thought("Hm."), said("Yes.")]))
    assert deltas_of(chunks) == [
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
        {"content": "Yes."},
    ]


def test_a_delta_without_anything_makes_no_chunk() -> None:
    assert chat_answer().chunks(Delta()) == []
    assert text_answer().chunks(Delta()) == []


@pytest.mark.parametrize("make", [chat_answer, text_answer])
def test_usage_comes_in_a_chunk_of_its_own_where_it_was_asked_for(make: Any) -> None:
    asked, silent = make(include_usage=True), make(include_usage=False)
    (chunk,) = asked.chunks(Delta([said("a")]))
    assert chunk["usage"] is None
    last = asked.last_chunk(USAGE)
    assert last["choices"] == []
    assert last["usage"] == usage_object(USAGE, False)
    (chunk,) = silent.chunks(Delta([said("a")]))
    assert "usage" not in chunk
    assert silent.last_chunk(USAGE) is None


def test_a_whole_chat_gathers_its_deltas() -> None:
    answer = chat_answer()
    answer.add(Delta([thought("Hm")]))
    answer.add(Delta([thought("."), said("Ye")], [report(0, -0.5)]))
    answer.add(Delta([said("s.")], [report(3, -0.25)], finish="stop"))
    whole = answer.whole(USAGE)
    assert whole["object"] == "chat.completion"
    assert whole["usage"] == usage_object(USAGE, False)
    (choice,) = whole["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
        "reasoning_content": "Hm.",
        "reasoning": "Hm.",
    }
    assert choice["finish_reason"] == "stop"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "bc"]


def test_a_whole_chat_without_thoughts_or_logprobs_does_not_mention_them() -> None:
    answer = chat_answer()
    answer.add(Delta([said("Yes.")], finish="stop"))
    (choice,) = answer.whole(USAGE)["choices"]
    assert set(choice["message"]) == {"role", "content", "refusal"}
    assert choice["logprobs"] is None


def test_log_probabilities_of_a_chat_name_tokens_by_text_and_bytes() -> None:
    delta = Delta([said("é")], [report(1, -1.0, (0, -0.5), (1, -1.0)), report(2, -2.0)])
    (chunk,) = chat_answer().chunks(delta)
    first, second = chunk["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "\N{REPLACEMENT CHARACTER}",
        "bytes": [0xC3],
        "logprob": -1.0,
        "top_logprobs": [
            {"token": "a", "bytes": [97], "logprob": -0.5},
            {"token": "\N{REPLACEMENT CHARACTER}", "bytes": [0xC3], "logprob": -1.0},
        ],
    }
    assert second["top_logprobs"] == []
    assert bytes(first["bytes"] + second["bytes"]).decode() == "é"


def test_log_probabilities_of_a_delta_are_sent_once() -> None:
    delta = Delta([thought("b"), said("c")], [report(3, -1.0)])
    logprobs = [c["choices"][0]["logprobs"] for c in chat_answer().chunks(delta)]
    assert logprobs[0] is not None
    assert logprobs[1:] == [None]


def test_log_probabilities_of_a_token_without_text_are_sent_all_the_same() -> None:
    (chunk,) = chat_answer().chunks(Delta([], [report(1, -1.0)]))
    assert chunk["choices"][0]["delta"] == {}
    assert len(chunk["choices"][0]["logprobs"]["content"]) == 1


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
