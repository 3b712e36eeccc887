"""The application: routes, errors and guards around one service."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server.failures import failure
from server.guards import BodyLimit
from server.metrics import RequestCounter
from server.openapi import DescribedApp
from server.protocol.errors import ApiError, internal_error
from server.routes.answering import CLIENT_CLOSED_REQUEST
from server.routes.chat import chat_routes
from server.routes.completions import completion_routes
from server.routes.embeddings import embedding_routes
from server.routes.messages import message_routes
from server.routes.models import model_routes
from server.routes.operations import operation_routes
from server.routes.responses import response_routes
from server.routes.tokenize import tokenize_routes
from server.service import Service

log = logging.getLogger(__name__)

ROUTES = (
    chat_routes,
    completion_routes,
    response_routes,
    message_routes,
    embedding_routes,
    tokenize_routes,
    model_routes,
    operation_routes,
)


def create_app(service: Service) -> FastAPI:
    """The ASGI application. Its lifespan attaches the engine to the event loop that serves it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.client.attach()
        yield

    app = DescribedApp(
        title="quire",
        version=version("quire"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for routes in ROUTES:
        app.include_router(routes(service))
    app.add_middleware(BodyLimit, max_body_bytes=int(service.config.limits.max_body_bytes))
    app.add_middleware(RequestCounter, metrics=service.metrics)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _bug)
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return failure(request.scope["path"], error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        found = ApiError(404, "There is nothing at this path.", type="not_found_error")
    elif error.status_code == 405:
        found = ApiError(405, f"This path does not answer {request.method}.")
    else:
        found = ApiError(error.status_code, str(error.detail))
    found.headers.update(error.headers or {})
    return await _api_error(request, found)


async def _client_left(_: Request, error: Exception) -> Response:
    """It went away while it was still sending: nobody's fault, and nobody reads the answer."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _bug(request: Request, error: Exception) -> Response:
    log.exception("request failed", exc_info=error)
    return await _api_error(request, internal_error())
