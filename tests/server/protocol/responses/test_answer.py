import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.types import MissReason, PrefixReport, SamplingParams
from server.protocol.answers import ResponseMetadata
from server.protocol.responses.answer import ResponseAnswer, response_usage
from server.protocol.responses.items import packed_reasoning
from server.protocol.responses.request import ResponsesRequest
from server.protocol.wire_errors import REPLICA_LOST, generation_failed, internal_error
from server.text.conversation import Channel, Conversation
from server.text.pieces import AnswerPiece, Delta, TextPiece, ToolCallArguments, Usage
from tests.server.protocol.finished import BYTES, USAGE, report
from tests.server.text.calling import call, said, thought

METADATA = ResponseMetadata("resp_ab", 123, "model-1")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
DELTAS = [
    Delta([thought("Hm")]),
    Delta([thought("."), said("Ye")]),
    Delta([said("s."), *call(0, "look", "{}")], finish="tool_calls"),
]


def response_answer(**how: Any) -> ResponseAnswer:
    wire = ResponsesRequest(input="Hello", metadata={"a": "b"})
    repeated = wire.repeated(Conversation(()), SamplingParams(max_tokens=5, temperature=0.5))
    return ResponseAnswer(METADATA, BYTES.__getitem__, repeated, **how)


def whole(*deltas: Delta) -> dict[str, Any]:
    answer = response_answer()
    for delta in deltas:
        answer.add(delta)
    return answer.whole(USAGE)


def events_of(answer: ResponseAnswer, *deltas: Delta) -> list[dict[str, Any]]:
    events = answer.first_chunks()
    for delta in deltas:
        events += answer.chunks(delta)
    return events + answer.last_chunks(USAGE)


def test_a_whole_response_is_what_the_sdk_types() -> None:
    found = whole(*DELTAS)
    assert Response.model_validate(found).to_dict() == found
    assert (found["id"], found["created_at"], found["model"]) == ("resp_ab", 123, "model-1")
    assert (found["object"], found["status"], found["error"]) == ("response", "completed", None)
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    assert found["usage"] == response_usage(USAGE, False)
    assert (found["temperature"], found["metadata"]) == (0.5, {"a": "b"})


def test_events_are_numbered_and_what_the_sdk_types() -> None:
    events = events_of(response_answer(), *DELTAS)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert EVENT.validate_python(event).to_dict() == event
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    for event in events[:2]:
        assert event["response"]["status"] == "in_progress"
        assert event["response"]["output"] == []
        assert event["response"]["usage"] is None


def test_a_stream_ends_with_the_whole_response() -> None:
    last = events_of(response_answer(), *DELTAS)[-1]
    assert (last["type"], last["response"]) == ("response.completed", whole(*DELTAS))


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    cut = Delta([said("Ye")], finish="length")
    found = whole(cut)
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"
    last = events_of(response_answer(), cut)[-1]
    assert (last["type"], last["response"]) == ("response.incomplete", found)


def test_a_fault_tells_how_far_the_response_had_come() -> None:
    kept: list[Any] = []
    answer = response_answer(keep=kept.append)
    before = answer.first_chunks() + answer.chunks(Delta([said("Ye")]))
    event = answer.failure(internal_error("Generation failed."))
    assert EVENT.validate_python(event).to_dict() == event
    assert (event["type"], event["sequence_number"]) == ("response.failed", len(before))
    response = event["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "Generation failed."}
    assert response["output"][0]["content"][0]["text"] == "Ye"
    assert kept == []


def test_a_fault_that_passes_by_itself_says_when_to_ask_again() -> None:
    event = response_answer().failure(generation_failed(REPLICA_LOST))
    assert EVENT.validate_python(event).to_dict() == event
    assert event["response"]["error"]["retry_after_s"] == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_is_kept_once_when_it_has_ended(streamed: bool) -> None:
    kept: list[Any] = []
    answer = response_answer(keep=kept.append)
    if streamed:
        events_of(answer, *DELTAS)
    else:
        for delta in DELTAS:
            answer.add(delta)
        assert kept == []
        answer.whole(USAGE)
    assert kept == [whole(*DELTAS)]


def test_usage_has_this_apis_names() -> None:
    usage = Usage(10, 5, 2, PrefixReport(8, 8, MissReason.NEVER_CACHED))
    found = response_usage(usage, True)
    assert found == {
        "input_tokens": 10,
        "input_tokens_details": {
            "cached_tokens": 8,
            "cache_miss": {"left_at": 8, "reason": "never_cached"},
            "cache_write_tokens": 0,
        },
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }
    assert "cache_miss" not in response_usage(usage, False)["input_tokens_details"]


ITEM: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)
Events = list[dict[str, Any]]


def output(*, packs_reasoning: bool = False) -> ResponseAnswer:
    metadata = ResponseMetadata("resp_ab", 0, "m")
    return ResponseAnswer(metadata, BYTES.__getitem__, {}, packs_reasoning=packs_reasoning)


def told(*pieces: AnswerPiece, finish: str = "stop", **how: Any) -> tuple[ResponseAnswer, Events]:
    """The output of an answer that has ended, and all its events."""
    made = output(**how)
    events = [event for piece in pieces for event in made.take(piece)]
    return made, events + made.end(finish)


def kinds(events: Events) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def rebuilt(events: Events) -> list[Any]:
    """What a client makes of the deltas alone."""
    items: list[Any] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append("")
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                items[event["output_index"]] += event["delta"]
    return items


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [
        item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items
    ]


def test_every_event_of_an_answer_comes_in_its_place() -> None:
    made, events = told(thought("Hm"), thought("."), said("Yes"), said("."), *call(0, "look", "{}"))
    assert kinds(events) == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert rebuilt(events) == texts(made.items) == ["Hm.", "Yes.", "{}"]
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert done == made.items


@pytest.mark.parametrize("packs_reasoning", [False, True])
def test_items_and_events_are_what_the_sdk_types(packs_reasoning: bool) -> None:
    pieces = [thought("Hm."), TextPiece(Channel.CONTENT, "a", (report(0, -0.5, (3, -0.25)),))]
    made, events = told(*pieces, *call(0, "look", "{}"), packs_reasoning=packs_reasoning)
    for item in made.items:
        assert ITEM.validate_python(item).to_dict() == item
    for event in events:
        numbered = event | {"sequence_number": 1}
        assert EVENT.validate_python(numbered).to_dict() == numbered


def test_items_have_ids_of_their_own_that_events_repeat() -> None:
    made, events = told(thought("a"), said("b"), *call(0, "f", "{}"), *call(1, "g", "{}"))
    ids = [item["id"] for item in made.items]
    assert ids == ["rs_ab0000", "msg_ab0001", "fc_ab0002", "fc_ab0003"]
    for event in events:
        own = event["item"]["id"] if "item" in event else event["item_id"]
        assert own == ids[event["output_index"]]


def test_what_is_begun_is_empty_and_in_progress() -> None:
    _, events = told(thought("a"), said("b"), *call(0, "f", "{}"))
    added = [event["item"] for event in events if event["type"].endswith("item.added")]
    assert [item["status"] for item in added] == ["in_progress"] * 3
    assert [item.get("content", item.get("arguments")) for item in added] == [[], [], ""]
    parts = [event["part"] for event in events if event["type"].endswith("part.added")]
    assert [part["text"] for part in parts] == ["", ""]


@pytest.mark.parametrize(
    ("pieces", "finish", "statuses"),
    [
        ([said("a")], "stop", ["completed"]),
        ([said("a")], "length", ["incomplete"]),
        ([thought("a"), said("b")], "length", ["completed", "incomplete"]),
        ([said("a"), *call(0, "f", "{}")], "tool_calls", ["completed", "completed"]),
        ([said("a"), *call(0, "f", "{")], "stop", ["completed", "incomplete"]),
        ([*call(0, "f", "{}"), said("a")], "stop", ["completed", "completed"]),
    ],
)
def test_what_was_cut_off_is_incomplete(
    pieces: list[AnswerPiece], finish: str, statuses: list[str]
) -> None:
    made, _ = told(*pieces, finish=finish)
    assert [item["status"] for item in made.items] == statuses


def test_an_answer_without_anything_is_a_message_without_text() -> None:
    made, events = told()
    (item,) = made.items
    assert (item["type"], texts([item]), item["status"]) == ("message", [""], "completed")
    assert kinds(events)[0] == "output_item.added"
    assert kinds(events)[-1] == "output_item.done"


def test_what_is_said_around_a_call_is_two_messages() -> None:
    made, _ = told(said("a"), *call(0, "f", "{}"), said("b"))
    assert [item["type"] for item in made.items] == ["message", "function_call", "message"]


def test_what_has_not_ended_is_told_as_far_as_it_has_come() -> None:
    made = output()
    for piece in (thought("a"), *call(0, "f", '{"a'), ToolCallArguments(0, '": 1')):
        made.take(piece)
    assert [item["status"] for item in made.items] == ["completed", "incomplete"]
    assert texts(made.items) == ["a", '{"a": 1']


def test_thoughts_are_packed_once_they_are_complete() -> None:
    made, events = told(thought("Hm"), thought("."), packs_reasoning=True)
    assert made.items[0]["encrypted_content"] == packed_reasoning("Hm.")
    assert events[0]["item"]["encrypted_content"] == packed_reasoning("")
    assert "encrypted_content" not in json.dumps(told(thought("Hm."))[0].items)


def test_log_probabilities_go_with_the_text_that_they_are_of() -> None:
    first, second = report(0, -0.5, (3, -0.25)), report(3, -1.0)
    pieces = [
        TextPiece(Channel.CONTENT, "a", (first,)),
        said("x"),
        TextPiece(Channel.CONTENT, "bc", (second,)),
    ]
    made, events = told(TextPiece(Channel.REASONING, "t", (second,)), *pieces)
    expected = [
        {
            "token": "a",
            "bytes": [97],
            "logprob": -0.5,
            "top_logprobs": [{"token": "bc", "bytes": [98, 99], "logprob": -0.25}],
        },
        {"token": "bc", "bytes": [98, 99], "logprob": -1.0, "top_logprobs": []},
    ]
    deltas = [event for event in events if event["type"].endswith("output_text.delta")]
    assert [event["logprobs"] for event in deltas] == [expected[:1], [], expected[1:]]
    (done,) = [event for event in events if event["type"].endswith("output_text.done")]
    assert done["logprobs"] == made.items[1]["content"][0]["logprobs"] == expected
    assert "logprobs" not in json.dumps(made.items[0])
