import json
import re
from collections.abc import Iterator
from itertools import islice
from json import JSONDecodeError
from typing import Any

import pytest
from fastapi.routing import APIRoute
from schemathesis.core.failures import FailureGroup
from starlette.responses import JSONResponse

from server.routes.openapi import DescribedApp
from tests.clients.fuzz import fuzz, fuzzed_app
from tests.fuzz.bodies import ORDINARY, Fields, families, in_order, mixture
from tests.fuzz.languages import grown

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


SLOW_BYTES = 2**16
INCOMPLETE = re.compile(" (open|close) ")


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


def test_sizes_double_up_to_the_limit_and_bodies_with_them(openapi: dict[str, Any]) -> None:
    for family in in_order(families(openapi), 1)[:100]:
        sizes = [(n, len(data)) for n, data in family.sizes() if len(data) < SLOW_BYTES]
        assert [n for n, _ in sizes] == [16 << power for power in range(len(sizes))]
        assert len(family.data(64)) < 5 * len(family.data(16))
        assert family.request(family.data(16)).startswith(family.method.encode())


def test_bodies_are_json_where_only_what_they_hold_is_odd(openapi: dict[str, Any]) -> None:
    checked = 0
    for family in families(openapi):
        if family.group in ("regex", "lark", "gbnf") or (
            family.group == "schema" and not INCOMPLETE.search(family.name)
        ):
            json.loads(family.data(3))
            checked += 1
    assert checked > 1000
    for route, body in ORDINARY.items():
        valid = [f for f in families(openapi) if f.path == route and f.group == "fields"]
        assert valid, body


def test_the_same_seed_gives_the_same_bodies(openapi: dict[str, Any]) -> None:
    once, again = (in_order(families(openapi), 7) for _ in range(2))
    assert once == again != in_order(families(openapi), 8)
    assert sorted(one.name for one in once) == sorted({one.name for one in once})
    groups = {family.group for family in islice(once, 7)}
    assert len(groups) == 7, "a beginning is a sample of all"
    mixtures = [mixture(openapi, number) for number in range(50)]
    assert mixtures == [mixture(openapi, number) for number in range(50)]
    assert len({family.body for family in mixtures}) == 50
    assert all(family.data(16) for family in mixtures)
