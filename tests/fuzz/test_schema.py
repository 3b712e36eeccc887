"""A few of the bodies that the OpenAPI schema promises answers to."""

from json import JSONDecodeError
from typing import Any

import pytest
from fastapi.routing import APIRoute
from schemathesis.core.failures import FailureGroup
from starlette.responses import JSONResponse

from server.routes.openapi import DescribedApp
from tests.clients.fuzz import fuzz, fuzzed_app

EXAMPLES = 10
# A model that makes vectors refuses most bodies: few are enough.
EXAMPLES_OF_VECTORS = 3


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
