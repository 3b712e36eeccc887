"""Events, and the message that they add up to."""

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.types import MissReason, PrefixReport
from server.protocol.messages.answer import MessageAnswer, add_events, message_error
from server.protocol.wire_errors import ApiError, internal_error, invalid
from server.text.conversation import Channel
from server.text.pieces import (
    AnswerPiece,
    Delta,
    TextPiece,
    ToolCallArguments,
    ToolCallStart,
)
from tests.server.protocol.finished import METADATA, USAGE

LOOK = ToolCallStart(0, "call_1", "look")
WAIT = ToolCallStart(1, "call_2", "wait")


def said(text: str) -> TextPiece:
    return TextPiece(Channel.CONTENT, text)


def thought(text: str) -> TextPiece:
    return TextPiece(Channel.REASONING, text)


def arguments(text: str, index: int = 0) -> ToolCallArguments:
    return ToolCallArguments(index, text)


def answer(**fields: Any) -> MessageAnswer:
    return MessageAnswer(METADATA, 10, 0, **fields)


def streamed(found: MessageAnswer, *deltas: Delta) -> list[dict[str, Any]]:
    found.first_chunks()
    return [event for delta in deltas for event in found.chunks(delta)]


def content(*pieces: AnswerPiece, finish: str = "stop") -> list[dict[str, Any]]:
    """The blocks of pieces that come one by one, which are those of all at once."""
    one_by_one = [Delta([piece]) for piece in pieces]
    blocks: list[dict[str, Any]] = []
    add_events(blocks, streamed(answer(), *one_by_one, Delta(finish=finish)))
    whole = answer()
    whole.add(Delta(list(pieces), finish=finish))
    found: list[dict[str, Any]] = whole.whole(USAGE)["content"]
    assert found == blocks
    return blocks


def end(delta: Delta, **fields: Any) -> tuple[str, str | None]:
    found = answer(**fields)
    found.chunks(delta)
    last, stop = found.last_chunks(USAGE)
    assert (last["type"], stop) == ("message_delta", {"type": "message_stop"})
    return last["delta"]["stop_reason"], last["delta"]["stop_sequence"]


# --- events ----------------------------------------------------------------------------------


def test_a_message_begins_without_content() -> None:
    start, ping = answer().first_chunks()
    assert ping == {"type": "ping"}
    assert start == {
        "type": "message_start",
        "message": {
            "id": "id-1",
            "type": "message",
            "role": "assistant",
            "model": "model-1",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": 10,
                "cache_read_input_tokens": 0,
                "cache_creation_input_tokens": 0,
                "output_tokens": 0,
                "output_tokens_details": {"thinking_tokens": 0},
            },
        },
    }


def test_blocks_begin_grow_and_end_in_order() -> None:
    events = streamed(
        answer(),
        Delta([thought("H")]),
        Delta([thought("m."), said("Let me")]),
        Delta([]),
        Delta([said(" look."), LOOK, arguments('{"at": ')]),
        Delta([arguments('"a"}')]),
        Delta(finish="tool_calls"),
    )
    kinds = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]
    assert kinds == [
        *[("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0)],
        *[("start", 1), ("delta", 1), ("delta", 1), ("stop", 1)],
        *[("start", 2), ("delta", 2), ("stop", 2)],
    ]
    assert [event["delta"] for event in events if "delta" in event] == [
        {"type": "thinking_delta", "thinking": "H"},
        {"type": "thinking_delta", "thinking": "m."},
        {"type": "signature_delta", "signature": "quire"},
        {"type": "text_delta", "text": "Let me"},
        {"type": "text_delta", "text": " look."},
        {"type": "input_json_delta", "partial_json": '{"at": "a"}'},
    ]
    assert events[9]["content_block"] == {
        "type": "tool_use",
        "id": "call_1",
        "name": "look",
        "input": {},
    }


def test_a_fault_is_an_event_of_its_own() -> None:
    found = answer().failure(internal_error("Generation failed."))
    assert found["type"] == "error"
    assert found["error"] == {"type": "api_error", "message": "Generation failed."}
    assert found["request_id"].startswith("req_")


# --- content ---------------------------------------------------------------------------------


def test_thoughts_text_and_uses_of_tools_are_blocks() -> None:
    blocks = content(
        thought("Hm."),
        said("Let "),
        said("me."),
        LOOK,
        arguments('{"at":'),
        arguments(' "ü"}'),
        WAIT,
        arguments("{}", 1),
        finish="tool_calls",
    )
    assert blocks == [
        {"type": "thinking", "thinking": "Hm.", "signature": "quire"},
        {"type": "text", "text": "Let me."},
        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "ü"}},
        {"type": "tool_use", "id": "call_2", "name": "wait", "input": {}},
    ]


def test_an_answer_of_nothing_has_no_blocks() -> None:
    assert content() == []


@pytest.mark.parametrize(
    "written",
    ["", "[1]", '{"at": "a', '{"at": 1e999}', '{"at": "\\ud800"}', "[" * 5000],
)
def test_a_call_that_nobody_could_make_is_text(written: str) -> None:
    call = f'<tool_call>\n{{"name": "look", "arguments": {written}'
    pieces: list[AnswerPiece] = [LOOK, *([arguments(written)] if written else [])]
    assert content(*pieces) == [{"type": "text", "text": call}]
    assert content(said("Well."), *pieces, said(" So.")) == [
        {"type": "text", "text": f"Well.\n{call} So."}
    ]
    json.dumps(content(*pieces), allow_nan=False)


def test_of_several_calls_those_that_can_be_made_are() -> None:
    blocks = content(LOOK, arguments("{}"), WAIT, arguments("no", 1), finish="tool_calls")
    assert [block["type"] for block in blocks] == ["tool_use", "text"]


# --- ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delta", "reason", "stop_string"),
    [
        (Delta(finish="stop"), "end_turn", None),
        (Delta(finish="stop", stop_string="END"), "stop_sequence", "END"),
        (Delta(finish="length"), "max_tokens", None),
        (Delta([LOOK, arguments("{}")], finish="tool_calls"), "tool_use", None),
        (
            Delta([LOOK, arguments("{}")], finish="tool_calls", stop_string="END"),
            "tool_use",
            None,
        ),
        (Delta([LOOK, arguments("no")], finish="tool_calls"), "end_turn", None),
    ],
)
def test_every_end_has_its_reason(delta: Delta, reason: str, stop_string: str | None) -> None:
    assert end(delta) == (reason, stop_string)
    whole = answer()
    whole.add(delta)
    found = whole.whole(USAGE)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, stop_string)


def test_a_context_that_is_full_is_told_from_a_length_that_was_asked_for() -> None:
    exceeded = "model_context_window_exceeded"
    assert end(Delta(finish="length"), context_ends_it=True) == (exceeded, None)
    assert end(Delta(finish="stop"), context_ends_it=True) == ("end_turn", None)


# --- tokens ----------------------------------------------------------------------------------


def test_tokens_that_came_from_the_cache_are_counted_apart() -> None:
    usage = replace(USAGE, prefix=PrefixReport(4, 5, MissReason.EVICTED))
    counts = {
        "input_tokens": 6,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    found = answer(counts_cache=True)
    assert found.whole(usage)["usage"] == found.last_chunks(usage)[0]["usage"] == counts
    miss = {"cache_miss": {"left_at": 5, "reason": "evicted"}}
    reported = answer(counts_cache=True, cache_report=True)
    assert reported.whole(usage)["usage"] == counts | miss


def test_a_message_that_counts_the_cache_begins_with_its_first_delta() -> None:
    found = answer(counts_cache=True)
    assert found.first_chunks() == []
    start, *_ = found.chunks(Delta([said("Yes")], prefix=PrefixReport(4, 5, None)))
    counts = start["message"]["usage"]
    assert (counts["input_tokens"], counts["cache_read_input_tokens"]) == (6, 4)
    assert all(event["type"] != "message_start" for event in found.chunks(Delta([said("!")])))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_the_type_is_that_of_the_status(status: int, kind: str) -> None:
    assert message_error(ApiError(status, "No."), "req_1") == {
        "type": "error",
        "error": {"type": kind, "message": "No."},
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("message", "said"),
    [("It is not.", "tools[0].name: It is not."), ("tools[0].name: no", "tools[0].name: no")],
)
def test_the_parameter_is_named_once(message: str, said: str) -> None:
    found = message_error(invalid(message, "tools[0].name"), "req_1")
    assert found["error"]["message"] == said
