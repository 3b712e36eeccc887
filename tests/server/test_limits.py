"""The limits of bodies, at the doors that they stand at."""

from collections.abc import Callable

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from server.config import LimitsSection
from server.http.app import ROUTES, SHARED_ROUTES
from server.protocol.common import MAX_DEPTH, BodyLimits, limits_by_path
from server.routes.service import Service
from server.text.tokenizer import Tokenizer
from tests.server.harness import Engine, serving

LIMITS = limits_by_path(LimitsSection())
TOO_MANY = 400, "too_many_values"
BEYOND: dict[str, tuple[Callable[[BodyLimits], bytes], int, str]] = {
    "bytes": (lambda limits: b'"' + b"x" * limits.max_bytes + b'"', 413, "body_too_large"),
    "values": (lambda limits: b"[" + b"0," * limits.max_values + b"0]", *TOO_MANY),
    "containers": (lambda limits: b"[" + b"[]," * limits.max_containers + b"0]", *TOO_MANY),
    "names": (lambda limits: b"{" + b'"":0,' * limits.max_containers + b'"":0}', *TOO_MANY),
    "depth": (lambda _: b"[" * (MAX_DEPTH + 1), 400, "invalid_json"),
}


def test_every_route_that_takes_a_body_has_its_limits(service: Service) -> None:
    router = APIRouter()
    for add_routes in (*SHARED_ROUTES, *(module.add_routes for module in ROUTES)):
        add_routes(router, service)
    posts = {
        r.path for r in router.routes if isinstance(r, APIRoute) and "POST" in (r.methods or ())
    }
    assert posts == LIMITS.keys()


@pytest.mark.parametrize("path", LIMITS)
@pytest.mark.parametrize("limit", BEYOND)
async def test_a_body_beyond_a_limit_is_refused_by_every_route(
    engine: Engine, tokenizer: Tokenizer, path: str, limit: str
) -> None:
    make, status, code = BEYOND[limit]
    async with serving(engine.client, tokenizer) as (_, http):
        response = await http.post(path, content=make(LIMITS[path]))
    assert response.status_code == status
    error = response.json()["error"]
    assert isinstance(error, str) or error.get("code", code) == code
