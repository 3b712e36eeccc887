from collections.abc import Iterator
from json import JSONDecodeError
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from schemathesis.core.failures import FailureGroup
from starlette.responses import JSONResponse

from tests.clients.fuzz import fuzz, fuzzed_app
from tests.fuzz.bodies import ORDINARY, Fields, families
from tests.fuzz.languages import grown


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
    app = FastAPI(title="wrong", version="1", routes=[route])
    with pytest.raises((FailureGroup, JSONDecodeError)):
        fuzz(app, 1)


@pytest.fixture(scope="module")
def openapi() -> Iterator[dict[str, Any]]:
    with fuzzed_app() as app:
        yield app.openapi()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("[«0,»0]", b"[0,0,0,0]"),
        ("«[»1«]»", b"[[[1]]]"),
        ('{«"k§":¶,»"k":№}', b'{"k0":1,"k1":2,"k2":3,"k":3}'),
        ("a{0,№}", b"a{0,3}"),
        ("100% «%d»", b"100% %d%d%d"),
        ("«�»", b"\xff\xff\xff"),
    ],
)
def test_a_template_grows_as_its_marks_say(template: str, text: bytes) -> None:
    assert grown(template, 3) == text


def test_every_field_of_every_route_has_its_families(openapi: dict[str, Any]) -> None:
    known = families(openapi)
    assert {family.path for family in known if family.body} == set(ORDINARY)
    names = "\n".join(family.name for family in known)
    for field in Fields(openapi).all():
        assert f"{field.name} " in names
    assert ".messages[].tool_calls[].function.arguments " in names
