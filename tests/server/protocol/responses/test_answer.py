from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.types import MissReason, PrefixReport, SamplingParams
from server.protocol.answers import ResponseMetadata
from server.protocol.responses.answer import ResponseAnswer, response_usage
from server.protocol.responses.request import ResponsesRequest
from server.protocol.wire_errors import REPLICA_LOST, generation_failed, internal_error
from server.text.conversation import Conversation
from server.text.pieces import Delta, Usage
from tests.server.protocol.finished import BYTES, USAGE
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
