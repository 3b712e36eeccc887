"""One table says what becomes of every field; code, tests and FIELDS.md follow it."""

import json
from typing import Any

import pytest
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)
from openai.types.completion_create_params import (
    CompletionCreateParamsNonStreaming as TextParams,
)
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)
from pydantic import ValidationError

from server.config import LimitsSection
from server.protocol.chat.request import ChatRequest
from server.protocol.common import OpenAISamplingFields
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import FieldRule, Rule
from server.protocol.messages.request import MessagesRequest
from server.protocol.ollama.options import Options
from server.protocol.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from server.protocol.responses.request import ResponsesRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.protocol.wire_errors import ApiError
from tests.server.protocol.field_tables import DOCUMENT, ENDPOINTS, SECTIONS, Body, document

BODIES: dict[Body, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    CompletionRequest: {"prompt": "Hello"},
    ResponsesRequest: {"input": "Hello"},
    EmbeddingRequest: {"input": "Hello"},
    OpenAISamplingFields: {},
    MessagesRequest: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5},
    TokenizeRequest: {"prompt": "Hello"},
    DetokenizeRequest: {"tokens": [1]},
    OllamaChatRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    OllamaGenerateRequest: {"prompt": "Hello"},
    OllamaEmbedRequest: {"input": "Hello"},
    OllamaEmbeddingsRequest: {"prompt": "Hello"},
    ShowRequest: {},
    Options: {},
}
TABLES = {body: body.rules for body in BODIES}
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


def rows(rule: Rule) -> list[tuple[Body, FieldRule]]:
    return [(model, row) for model, table in TABLES.items() for row in table if row.rule is rule]


def names_of(model: Body) -> set[str]:
    return {row.name for row in model.rules}


def check(model: Body, **given: Any) -> None:
    wire = model.model_validate_json(json.dumps(BODIES[model] | given))
    wire.check(LimitsSection())


@pytest.mark.parametrize("model", TABLES)
def test_the_accepted_fields_are_those_of_the_wire_model(model: Body) -> None:
    names = [row.name for row in TABLES[model]]
    assert len(names) == len(set(names))
    accepted = {row.name for row in TABLES[model] if row.rule is Rule.ACCEPTED}
    assert accepted == set(model.model_fields)


def test_every_field_of_openais_client_has_its_rule() -> None:
    for params in (CompletionCreateParamsNonStreaming, CompletionCreateParamsStreaming):
        assert set(params.__annotations__) <= names_of(ChatRequest)
    for body in (ResponseCreateParamsNonStreaming, ResponseCreateParamsStreaming):
        assert set(body.__annotations__) <= names_of(ResponsesRequest)
    assert set(TextParams.__annotations__) <= names_of(CompletionRequest)
    assert set(EmbeddingCreateParams.__annotations__) <= names_of(EmbeddingRequest)


@pytest.mark.parametrize(
    ("model", "row"), rows(Rule.REFUSED), ids=lambda value: getattr(value, "name", "")
)
def test_what_is_refused_is_named_unless_it_says_nothing(model: Body, row: FieldRule) -> None:
    with pytest.raises(ApiError) as caught:
        check(model, **{row.name: "zebra"})
    assert (caught.value.status, caught.value.param) == (400, row.name)
    assert row.note in caught.value.message
    assert "zebra" not in caught.value.message
    wants_true = any(value is True for value in row.harmless)
    for value in (None, *row.harmless, *(() if wants_true else NOTHING)):
        check(model, **{row.name: value})


def whole_numbers() -> list[tuple[Body, str, Any]]:
    """All fields that are whole numbers, or lists of them, each with one."""
    found: list[tuple[Body, str, Any]] = []
    for model in TABLES:
        for name, schema in model.model_json_schema()["properties"].items():
            for kind in schema.get("anyOf", [schema]):
                if kind.get("type") == "integer":
                    found.append((model, name, max(1, kind.get("minimum", 1))))
                elif kind.get("items", {}).get("type") == "integer":
                    found.append((model, name, [1, 2]))
    return found


@pytest.mark.parametrize(("model", "name", "value"), whole_numbers())
def test_a_whole_number_may_be_written_with_a_point(model: Body, name: str, value: Any) -> None:
    def read(given: Any) -> Any:
        return getattr(model.model_validate_json(json.dumps(BODIES[model] | {name: given})), name)

    floats = [*map(float, value)] if isinstance(value, list) else float(value)
    assert repr(read(floats)) == repr(value)
    for wrong in (
        ([*value[:1], 8.5], [True]) if isinstance(value, list) else (8.5, "8", True, 1e999)
    ):
        with pytest.raises(ValidationError):
            read(wrong)


def test_false_is_refused_where_true_is_what_happens() -> None:
    with pytest.raises(ApiError) as caught:
        check(ChatRequest, skip_special_tokens=False)
    assert caught.value.param == "skip_special_tokens"


@pytest.mark.parametrize(
    ("model", "row"), rows(Rule.IGNORED), ids=lambda value: getattr(value, "name", "")
)
def test_what_is_ignored_may_be_anything(model: Body, row: FieldRule) -> None:
    for value in (*NOTHING, "x", 5, {"a": [1]}, True):
        check(model, **{row.name: value})


@pytest.mark.parametrize("model", TABLES)
def test_what_nobody_has_heard_of_is_ignored(model: Body) -> None:
    check(model, heard_of=False, **{"a b": [1], "_private": {}, "model_fields": 1})


def test_the_documentation_has_all_tables() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document()
    assert {name for section in SECTIONS for name in section} == {*ENDPOINTS}
    assert {*ENDPOINTS.values()} == {*BODIES} - {OpenAISamplingFields}
