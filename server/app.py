"""The application: routes, errors and guards around one service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from server.drain import DrainGuard
from server.guards.body import BodyLimit
from server.guards.bugs import BugGuard
from server.guards.headers import SafeHeaders
from server.guards.hosts import AllowedHosts, HostGuard
from server.guards.keys import KeyGuard, Keys
from server.guards.origins import AllowedOrigins, OriginGuard
from server.guards.slashes import TrailingSlash
from server.guards.unread import UnreadBody
from server.http_errors import error_response
from server.idle_memory import release_when_idle
from server.openapi import DescribedApp
from server.protocol.wire_errors import ApiError
from server.request_observer import RequestObserver
from server.routes.answering import CLIENT_CLOSED_REQUEST
from server.routes.chat import chat_routes
from server.routes.completions import completion_routes
from server.routes.embeddings import embedding_routes
from server.routes.memory import memory_routes
from server.routes.messages import message_routes
from server.routes.models import model_routes
from server.routes.operations import operation_routes
from server.routes.page import page_routes
from server.routes.responses import response_routes
from server.routes.tokenize import tokenize_routes
from server.service import Service

ROUTES = (
    chat_routes,
    completion_routes,
    response_routes,
    message_routes,
    embedding_routes,
    tokenize_routes,
    model_routes,
    memory_routes,
    page_routes,
    operation_routes,
)


def create_app(service: Service) -> FastAPI:
    """Make the ASGI application. Its lifespan attaches the engine to the event loop that serves
    it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.client.attach()
        releasing = asyncio.create_task(release_when_idle(service.drain))
        yield
        releasing.cancel()
        await service.grammars.close()

    app = ObservedApp(
        service,
        title="quire",
        version=version("quire"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for routes in ROUTES:
        app.include_router(routes(service))
    _add_guards(app, service)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    return app


class ObservedApp(DescribedApp):
    """An application whose observer surrounds even its answers to bugs."""

    def __init__(self, service: Service, **options: Any) -> None:
        self._service = service
        super().__init__(**options)

    def build_middleware_stack(self) -> ASGIApp:
        """Put the observer around the whole application."""
        return RequestObserver(
            super().build_middleware_stack(),
            self._service.metrics,
            self._service.recent,
            logs_requests=self._service.config.log.requests,
        )


def _add_guards(app: FastAPI, service: Service) -> None:
    """Add the guards, each around those before it. Raises SettingError."""
    config, count = service.config, service.metrics.count_refusal
    app.add_middleware(TrailingSlash)
    app.add_middleware(BodyLimit, max_body_bytes=int(config.limits.max_body_bytes), count=count)
    app.add_middleware(BugGuard)
    app.add_middleware(
        DrainGuard,
        drain=service.drain,
        retry_after_s=config.limits.retry_after_s,
        count_refusal=count,
    )
    app.add_middleware(KeyGuard, keys=Keys.of(config.access), count=count)
    app.add_middleware(OriginGuard, allowed=AllowedOrigins.of(config.access), count=count)
    app.add_middleware(HostGuard, allowed=AllowedHosts.of(config), count=count)
    app.add_middleware(SafeHeaders)
    app.add_middleware(UnreadBody)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        found = ApiError(404, "There is nothing at this path.", type="not_found_error")
    elif error.status_code == 405 and request.method == "POST" and _is_unknown(request):
        found = ApiError(404, "There is nothing to ask here.", type="not_found_error")
    elif error.status_code == 405:
        found = ApiError(405, f"This path does not answer {request.method}.")
    else:
        found = ApiError(error.status_code, str(error.detail))
    found.headers.update(error.headers or {})
    return await _api_error(request, found)


def _is_unknown(request: Request) -> bool:
    """Return whether a path is one of OpenAI's that this server does not have. Some look like the
    id of a response here, which can be read or deleted."""
    path: str = request.scope["path"]
    return path.startswith("/v1/responses/")


async def _client_left(_: Request, error: Exception) -> Response:
    """Answer a client that went away while it was still sending: nobody reads the answer."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
