from typing import Annotated, Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from server.protocol.answers import ResponseMetadata
from server.protocol.common import WireModel
from server.protocol.messages.answer import MessageAnswer, message_error
from server.protocol.ollama.answer import OllamaAnswer
from server.protocol.responses.answer import ResponseAnswer
from server.protocol.wire_errors import (
    REPLICA_LOST,
    REPLICAS_FULL,
    ApiError,
    UnknownModelError,
    come_back,
    from_validation,
    generation_failed,
    internal_error,
    quoted,
)


class Inner(WireModel):
    kind: str


class Outer(WireModel):
    count: Annotated[int, Field(ge=0)] | None = None
    items: str | list[Inner] | None = None
    table: dict[str, float] | None = None


def refusal(body: str) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate_json(body)
    return from_validation(caught.value)


def test_where_headers_were_sent_before_the_error_says_when_itself() -> None:
    full = come_back(429, "The queue is full", "queue_full")
    assert full.late_body()["error"] == full.body()["error"] | {"retry_after_s": 1}
    assert internal_error().late_body() == internal_error().body()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        '{"count": 1,}',
        "nonsense",
        '{"items": "\\ud800"}',
        '{"items": "\\udc00\\ud800"}',
        "[" * 10_000,
        '{"count": ' + "9" * 5_000 + "}",
    ],
)
def test_a_body_that_is_no_json_says_where_it_goes_wrong(body: str) -> None:
    error = refusal(body)
    assert (error.status, error.param, error.code) == (400, None, "invalid_json")
    assert "at line 1 column " in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"a": "\\ud800"}', "a"),
        ('{"a": [1, {"b": "x\\udc00\\ud800"}], "c": null}', "a[1].b"),
        ('["\\ud83d\\ude00", "\\ude00"]', "[1]"),
    ],
)
def test_half_of_a_character_is_named_by_its_parameter(body: str, param: str) -> None:
    error = half_read(body)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize("body", ['{"a": "\\ud83d\\ude00"', "[" * 100_000, ""])
def test_a_body_that_is_broken_otherwise_has_no_parameter_to_name(body: str) -> None:
    assert half_read(body).code == "invalid_json"


def half_read(body: str) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter[Any](Any).validate_json(body)
    return from_validation(caught.value, body.encode())


def test_an_error_lists_a_few_problems_and_no_more() -> None:
    items: list[Any] = ['{"kind": 5}'] * 10
    assert refusal('{"items": [' + ", ".join(items) + "]}").message.count("items") == 3


def test_a_name_that_a_client_chose_is_repeated_up_to_a_length() -> None:
    assert quoted("gpt-5") == "'gpt-5'"
    assert quoted("a'\n") == '"a\'\\n"'
    assert len(quoted("x" * 1_000_000)) < 300
    assert len(UnknownModelError("x" * 1_000_000).message) < 500
    assert (
        "does not exist here; did you mean 'b\\n'? GET /v1" in UnknownModelError("a", "b\n").message
    )


@pytest.mark.parametrize(
    ("reason", "code"), [(REPLICA_LOST, "replica_lost"), (REPLICAS_FULL, "replicas_full")]
)
def test_what_a_replica_could_not_do_may_be_sent_again(reason: str, code: str) -> None:
    error = generation_failed(reason)
    assert (error.status, error.code, error.headers["Retry-After"]) == (503, code, "1")
    assert error.message == f"Generation failed: {reason}; try again later."


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
def test_the_type_of_anthropics_error_is_that_of_its_status(status: int, kind: str) -> None:
    assert message_error(ApiError(status, "No."), "req_1") == {
        "type": "error",
        "error": {"type": kind, "message": "No."},
        "request_id": "req_1",
    }


def test_a_stream_that_fails_in_passing_says_when_to_ask_again() -> None:
    metadata, error = ResponseMetadata("resp_1", 1, "m"), generation_failed(REPLICA_LOST)
    response = ResponseAnswer(metadata, bytes, {})
    for told in (
        response.failure(error)["response"]["error"],
        MessageAnswer(metadata, 1, 0).failure(error)["error"],
        OllamaAnswer("chat", "m", bytes).failure(error),
    ):
        assert told["retry_after_s"] == 1
