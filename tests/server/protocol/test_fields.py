"""One table says what becomes of every field; code, tests and API.md follow it."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)
from openai.types.completion_create_params import (
    CompletionCreateParamsNonStreaming as TextParams,
)
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)

from server.config import LimitsSection
from server.protocol.chat import ChatRequest
from server.protocol.common import DrawingFields, SamplingFields
from server.protocol.completions import CompletionRequest
from server.protocol.errors import ApiError
from server.protocol.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    SAMPLING_FIELDS,
    FieldRule,
    Rule,
)
from server.protocol.message_fields import MESSAGES_FIELDS
from server.protocol.messages import MessagesRequest
from server.protocol.response_fields import RESPONSES_FIELDS
from server.protocol.responses import ResponsesRequest

API = Path(__file__).parents[3] / "API.md"
TABLES: dict[type[DrawingFields], tuple[FieldRule, ...]] = {
    ChatRequest: CHAT_FIELDS,
    CompletionRequest: COMPLETION_FIELDS,
    ResponsesRequest: RESPONSES_FIELDS,
    SamplingFields: SAMPLING_FIELDS,
    MessagesRequest: MESSAGES_FIELDS,
}
BODIES: dict[type[DrawingFields], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    CompletionRequest: {"prompt": "Hello"},
    ResponsesRequest: {"input": "Hello"},
    SamplingFields: {},
    MessagesRequest: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
}
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


def rows(rule: Rule) -> list[tuple[type[DrawingFields], FieldRule]]:
    return [(model, row) for model, table in TABLES.items() for row in table if row.rule is rule]


def check(model: type[DrawingFields], **given: Any) -> None:
    wire = model.model_validate_json(json.dumps(BODIES[model] | given))
    wire.check(LimitsSection())


@pytest.mark.parametrize("model", TABLES)
def test_the_accepted_fields_are_those_of_the_wire_model(model: type[DrawingFields]) -> None:
    names = [row.name for row in TABLES[model]]
    assert len(names) == len(set(names))
    assert model.rules is TABLES[model]
    accepted = {row.name for row in TABLES[model] if row.rule is Rule.ACCEPTED}
    assert accepted == set(model.model_fields)


def test_every_field_of_openais_client_has_its_rule() -> None:
    for params in (CompletionCreateParamsNonStreaming, CompletionCreateParamsStreaming):
        assert set(params.__annotations__) <= {row.name for row in CHAT_FIELDS}
    for body in (ResponseCreateParamsNonStreaming, ResponseCreateParamsStreaming):
        assert set(body.__annotations__) <= {row.name for row in RESPONSES_FIELDS}
    assert set(TextParams.__annotations__) <= {row.name for row in COMPLETION_FIELDS}


@pytest.mark.parametrize(
    ("model", "row"), rows(Rule.REFUSED), ids=lambda value: getattr(value, "name", "")
)
def test_what_is_refused_is_named_unless_it_says_nothing(
    model: type[DrawingFields], row: FieldRule
) -> None:
    with pytest.raises(ApiError) as caught:
        check(model, **{row.name: "zebra"})
    assert (caught.value.status, caught.value.param) == (400, row.name)
    assert row.note in caught.value.message
    assert "zebra" not in caught.value.message
    for value in (*NOTHING, *row.harmless):
        check(model, **{row.name: value})


@pytest.mark.parametrize(
    ("model", "row"), rows(Rule.IGNORED), ids=lambda value: getattr(value, "name", "")
)
def test_what_is_ignored_may_be_anything(model: type[DrawingFields], row: FieldRule) -> None:
    for value in (*NOTHING, "x", 5, {"a": [1]}, True):
        check(model, **{row.name: value})


@pytest.mark.parametrize("model", TABLES)
def test_what_nobody_has_heard_of_is_ignored(model: type[DrawingFields]) -> None:
    check(model, heard_of=False, **{"a b": [1], "_private": {}, "model_fields": 1})


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("/v1/chat/completions", CHAT_FIELDS),
        ("/v1/completions", COMPLETION_FIELDS),
        ("/v1/messages", MESSAGES_FIELDS),
        ("/v1/responses", RESPONSES_FIELDS),
    ],
)
def test_the_documentation_has_the_table(heading: str, table: tuple[FieldRule, ...]) -> None:
    ordered = [row for rule in Rule for row in table if row.rule is rule]
    lines = [f"| {row.name} | {row.rule.value} | {row.note} |" for row in ordered]
    text = "\n".join([f"## {heading}", "", "| field | | |", "|---|---|---|", *lines, ""])
    assert text in API.read_text(encoding="utf-8"), text
