"""The OpenAPI schema."""

from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from server.http.app import create_app
from server.protocol.chat.request import ChatRequest
from server.protocol.common import WireModel
from server.protocol.completions import CompletionRequest
from server.protocol.ollama.request import OllamaChatRequest
from server.routes.openapi import LINES, takes
from server.routes.service import Service


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


def test_a_schema_is_made_once(service: Service) -> None:
    app = create_app(service)
    assert app.openapi() is app.openapi()
