"""Builds the ASGI application from routes, error handlers and guards. Frees memory when idle."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from math import inf
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.machine import release_free_memory
from server.chat.drain import Drain
from server.config import engine_config
from server.http.errors import add_error_handlers
from server.http.guards.answers import AnswerGuard
from server.http.guards.body import BodyLimit, UnreadBody
from server.http.guards.hosts import AllowedHosts, AllowedOrigins, HostGuard, OriginGuard
from server.http.guards.keys import KeyGuard, Keys
from server.http.observer import RequestObserver
from server.metrics.answer_times import RecentRequests
from server.protocol.answers import Json
from server.routes import (
    completions,
    embeddings,
    models,
    ollama,
    operations,
    page,
    responses,
    tokenize,
)
from server.routes.openapi import completed
from server.routes.service import Served, Service

# Seconds between two checks of whether the server is idle.
LOOK_S = 15.0


def freeze_objects() -> None:
    """Exempt all existing objects from garbage collection, whose pauses stop all threads."""
    gc.collect()
    gc.freeze()


async def release_when_idle(drain: Drain, keep_s: float, forget: Callable[[], None]) -> None:
    """Release free memory to the system every LOOK_S seconds while no request runs, because the C
    library keeps memory of ended requests (see engine/machine.py). Do nothing before the first
    request. After ``keep_s`` idle seconds, call ``forget``, too."""
    loop = asyncio.get_running_loop()
    idle_since = inf
    while True:
        await asyncio.sleep(LOOK_S)
        if drain.answering or not drain.answered:
            idle_since = inf
            continue
        idle_since = min(idle_since, loop.time())
        if loop.time() - idle_since >= keep_s:
            forget()
        await asyncio.to_thread(release_free_memory)


class TrailingSlash:
    """Removes the slash at the end of a request's path. The guards still see the slash."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if len(path) > 1 and path.endswith("/"):
            scope["path"] = path.rstrip("/") or "/"
        await self._app(scope, receive, send)


SHARED_ROUTES = (
    models.add_routes,
    ollama.add_model_routes,
    operations.add_state_routes,
    page.add_page_routes,
)
ROUTES = (completions, embeddings, ollama, operations, responses, tokenize)


def create_app(service: Service) -> FastAPI:
    """Make the ASGI application. When it starts, it attaches the engine to the event loop."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.client.attach()
        keep_s, forget = engine_config(service.config).prefix_keep_s, service.grammars.forget
        async with in_background(release_when_idle(service.drain, keep_s, forget)):
            yield
        await service.grammars.close()

    app = app_of(service, service.recent, service.model.id, lifespan=lifespan)
    for routes in ROUTES:
        routes.add_routes(app.router, service)
    return app


@asynccontextmanager
async def in_background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines while the context is open, then cancel them."""
    tasks = [asyncio.create_task(each) for each in work]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def app_of(
    served: Served, recent: RecentRequests, model: str | None = None, **options: Any
) -> FastAPI:
    """Make an application with the routes that every server has, guards, and error handlers.
    ``model``: the name for the log if there is one model only. Raises SettingError."""
    config, count = served.config, served.metrics.count_refusal
    observer = partial(
        RequestObserver,
        metrics=served.metrics,
        recent=recent,
        logs_requests=config.log.requests,
        model=model,
    )
    app = ObservedApp(observer, **options)
    for add_routes in SHARED_ROUTES:
        add_routes(app.router, served)
    # From the innermost to the outermost.
    app.add_middleware(TrailingSlash)
    max_body_bytes = int(config.limits.max_body_bytes)
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes, count=count)
    app.add_middleware(AnswerGuard, drain=served.drain, count_refusal=count)
    app.add_middleware(KeyGuard, keys=Keys.of(config.access), count=count)
    app.add_middleware(OriginGuard, allowed=AllowedOrigins.of(config.access), count=count)
    app.add_middleware(HostGuard, allowed=AllowedHosts.of(config), count=count)
    app.add_middleware(UnreadBody)
    add_error_handlers(app)
    return app


class ObservedApp(FastAPI):
    """An application inside a RequestObserver, which therefore sees even responses after a bug. Its
    OpenAPI schema describes bodies and errors."""

    def __init__(self, observer: Callable[[ASGIApp], RequestObserver], **options: Any) -> None:
        self._observer = observer
        super().__init__(
            title="quire",
            version=version("quire"),
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            **options,
        )

    def openapi(self) -> Json:
        if self.openapi_schema is None:
            self.openapi_schema = completed(super().openapi())
        return self.openapi_schema

    def build_middleware_stack(self) -> ASGIApp:
        return self._observer(super().build_middleware_stack())
