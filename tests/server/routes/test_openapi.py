"""The OpenAPI schema, and a few of the bodies that it promises answers to."""

from json import JSONDecodeError
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from schemathesis.core.failures import FailureGroup
from starlette.responses import JSONResponse

from server.protocol.chat.request import ChatRequest
from server.protocol.common import WireModel
from server.protocol.completions.request import CompletionRequest
from server.protocol.ollama.request import OllamaChatRequest
from server.routes.openapi import LINES, DescribedApp, takes
from tests.clients.fuzz import fuzz, fuzzed_app

EXAMPLES = 10
# A model that makes vectors refuses most bodies: few are enough.
EXAMPLES_OF_VECTORS = 3


async def schema_of(http: httpx2.AsyncClient) -> dict[str, Any]:
    response = await http.get("/openapi.json")
    assert response.status_code == 200
    schema: dict[str, Any] = response.json()
    return schema


def references(value: Any) -> list[str]:
    """All that is referred to."""
    if isinstance(value, list):
        return [name for member in value for name in references(member)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + references(list(value.values()))


async def test_every_body_is_described_by_the_model_that_parses_it(
    http: httpx2.AsyncClient, app: FastAPI
) -> None:
    schema = await schema_of(http)
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            assert ("requestBody" in operation) == (method == "post"), path
    chat = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    assert (
        chat["application/json"]["schema"]["properties"].keys() == ChatRequest.model_fields.keys()
    )


async def test_what_is_referred_to_is_there(http: httpx2.AsyncClient) -> None:
    schema = await schema_of(http)
    shared = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}
    used = set(references(schema))
    assert used <= shared
    assert "#/components/schemas/ChatRequest.Message" in used
    assert "$defs" not in str(schema)


async def test_errors_are_described_as_their_api_has_them(http: httpx2.AsyncClient) -> None:
    paths = (await schema_of(http))["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            content = operation["responses"]["4XX"]["content"]["application/json"]
            owner = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"
            owner = "OllamaError" if path.startswith("/api/") else owner
            assert content["schema"]["$ref"].endswith(owner)


class NeverStreamed(WireModel):
    """A body without ``stream``."""

    text: str


@pytest.mark.parametrize(
    ("described", "kinds"),
    [
        (takes(CompletionRequest), {"application/json", "text/event-stream"}),
        (takes(OllamaChatRequest, LINES), {"application/json", "application/x-ndjson"}),
        (takes(NeverStreamed), {"application/json"}),
    ],
)
def test_only_what_can_be_streamed_promises_a_stream(
    described: dict[str, Any], kinds: set[str]
) -> None:
    assert described["responses"]["200"]["content"].keys() == kinds


def test_a_schema_is_made_once() -> None:
    app = DescribedApp(title="quire", version="1")
    assert app.openapi() is app.openapi()


def test_no_body_gives_a_500_and_every_error_has_its_shape() -> None:
    with fuzzed_app() as app:
        found = fuzz(app, EXAMPLES)
    chat, completions = found["POST /v1/chat/completions"], found["POST /v1/completions"]
    assert {200, 400} <= set(chat)
    assert {200, 400} <= set(completions)
    assert {200, 400} <= set(found["POST /v1/responses"])
    assert {200, 400} <= set(found["POST /api/chat"]) & set(found["POST /api/generate"])


def test_no_body_gives_a_500_where_vectors_are_made() -> None:
    with fuzzed_app(pools=True) as app:
        found = fuzz(app, EXAMPLES_OF_VECTORS)
    assert {200, 400} <= set(found["POST /v1/embeddings"])
    assert {200, 400} <= set(found["POST /api/embed"])
    assert 200 not in found["POST /v1/chat/completions"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"detail": "FastAPI's own"}),
        (400, {"error": "a string"}),
        (404, {"error": {"message": "no code", "type": "not_found_error", "param": None}}),
        (500, {"error": {"message": "a bug", "type": "server_error", "param": None, "code": None}}),
        (302, {}),
    ],
)
def test_an_answer_that_must_not_be_is_found(status: int, body: dict[str, Any]) -> None:
    async def wrong() -> JSONResponse:
        return JSONResponse(body, status)

    route = APIRoute("/v1/completions", wrong, methods=["POST"])
    app = DescribedApp(title="wrong", version="1", routes=[route])
    with pytest.raises((FailureGroup, JSONDecodeError)):
        fuzz(app, 1)
