"""FIELDS.md and fields.toml list every field that clients send, and the code does what they say."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.beta.message_create_params import (
    MessageCreateParamsStreaming as BetaParams,
)
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsStreaming
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
from server.protocol.common import FieldsChecked, OpenAISamplingFields
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import RefusedField
from server.protocol.fields import refused as fields_of
from server.protocol.messages.request import CountTokensRequest, MessagesRequest
from server.protocol.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    Options,
    ShowRequest,
)
from server.protocol.responses.request import ResponsesRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.protocol.wire_errors import ApiError

DOCUMENT = Path(__file__).parents[3] / "server" / "protocol" / "FIELDS.md"
Body = type[FieldsChecked]
BODIES: dict[Body, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    CompletionRequest: {"prompt": "Hello"},
    ResponsesRequest: {"input": "Hello"},
    EmbeddingRequest: {"input": "Hello"},
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
ENDPOINTS: dict[str, Body] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "options of both": Options,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": ShowRequest,
}
NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# A header, and two of betas that take what follows from other servers than this one.
NO_FIELDS = {"betas", "billing_policy", "fallback_credit_token"}


def documented() -> dict[str, dict[str, list[str]]]:
    """Return FIELDS.md as ``{endpoint: {"accepted" | "ignored": [field]}}``."""
    tables: dict[str, Any] = {name: defaultdict(list) for name in ENDPOINTS}
    for section in DOCUMENT.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        for line in lines[3:]:
            first, bar, second = line.partition(" | ")
            rule, names = ("ignored", second) if first == "**ignored**" else ("accepted", first)
            for endpoint in heading.split(", ") if bar else ():
                tables[endpoint][rule] += names.split(", ")
    return tables


FIELDS = documented()


def refused() -> list[tuple[Body, RefusedField]]:
    return [
        (model, field)
        for model in BODIES
        for field in model.refused_fields
        if field.name not in model.model_fields
    ]


def names_of(endpoint: str) -> list[str]:
    """All names, each with one rule."""
    tables, model = FIELDS[endpoint], ENDPOINTS[endpoint]
    own = [field.name for body, field in refused() if body is model]
    return [*tables["accepted"], *tables["ignored"], *own]


def check(model: Body, **given: Any) -> None:
    wire = model.model_validate_json(json.dumps(BODIES[model] | given))
    wire.check(LimitsSection())


def test_every_body_is_documented() -> None:
    assert {*ENDPOINTS.values()} == {*BODIES}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_the_documented_fields_are_those_of_the_wire_model(endpoint: str) -> None:
    names = names_of(endpoint)
    assert len(names) == len({*names}), "each has one rule"
    assert {*FIELDS[endpoint]["accepted"]} == {*ENDPOINTS[endpoint].model_fields}


def test_ollamas_options_have_a_rule_for_each_that_other_apis_have() -> None:
    others = {*OpenAISamplingFields.model_fields, *(field.name for field in fields_of("sampling"))}
    assert others - {"model", "stream", "stream_options"} <= {*names_of("options of both")}


@pytest.mark.parametrize(
    ("endpoint", "params"),
    [
        ("/v1/chat/completions", CompletionCreateParamsNonStreaming),
        ("/v1/chat/completions", CompletionCreateParamsStreaming),
        ("/v1/responses", ResponseCreateParamsNonStreaming),
        ("/v1/responses", ResponseCreateParamsStreaming),
        ("/v1/completions", TextParams),
        ("/v1/embeddings", EmbeddingCreateParams),
        ("/v1/messages", MessageCreateParamsStreaming),
        ("/v1/messages", MessageCountTokensParams),
        ("/v1/messages", BetaParams),
    ],
)
def test_every_field_of_the_vendors_clients_has_its_rule(endpoint: str, params: type) -> None:
    assert set(params.__annotations__) - NO_FIELDS <= {*names_of(endpoint)}


def test_what_counts_is_accepted_by_both_paths_of_messages() -> None:
    assert set(CountTokensRequest.model_fields) <= {*FIELDS["/v1/messages"]["accepted"]}


@pytest.mark.parametrize(("model", "row"), refused(), ids=lambda value: getattr(value, "name", ""))
def test_what_is_refused_is_named_unless_it_says_nothing(model: Body, row: RefusedField) -> None:
    with pytest.raises(ApiError) as caught:
        check(model, **{row.name: "zebra"})
    assert (caught.value.status, caught.value.param) == (400, row.name)
    assert row.remedy in caught.value.message
    assert "zebra" not in caught.value.message
    wants_true = any(value is True for value in row.harmless)
    for value in (None, *row.harmless, *(() if wants_true else NOTHING)):
        check(model, **{row.name: value})


def whole_numbers() -> list[tuple[Body, str, Any]]:
    """All fields that are whole numbers, or lists of them, each with one."""
    found: list[tuple[Body, str, Any]] = []
    for model in BODIES:
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
    ("endpoint", "name"), [(one, name) for one in ENDPOINTS for name in FIELDS[one]["ignored"]]
)
def test_what_is_ignored_may_be_anything(endpoint: str, name: str) -> None:
    for value in (*NOTHING, "x", 5, {"a": [1]}, True):
        check(ENDPOINTS[endpoint], **{name: value})
