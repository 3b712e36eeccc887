"""The application of several models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from math import inf

from fastapi import FastAPI

from server.http.app import ObservedApp, add_guards
from server.http.errors import add_error_handlers
from server.http.idle_memory import release_when_idle
from server.metrics.answer_times import RecentRequests
from server.routes.page import page_routes
from server.supervisor.errors import LoadError, NoRoomError
from server.supervisor.front import Front
from server.supervisor.metrics import FrontMetrics
from server.supervisor.routes import forwarding_routes, model_list_routes, operation_routes


def create_front(front: Front) -> tuple[FastAPI, FrontMetrics]:
    """Make the ASGI application. Its lifespan loads pinned models and ends all processes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        releasing = release_when_idle(front.drain, inf, lambda: None)
        work = [front.models.keep_time(), _load_pinned(front), releasing]
        if front.awake is not None:
            work.append(front.keep_awake(front.awake))
        tasks = [asyncio.create_task(its) for its in work]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await front.models.close()

    config, metrics = front.config, FrontMetrics(front.models)
    app = ObservedApp(metrics, RecentRequests(), config, lifespan=lifespan, openapi_url=None)
    for router in (
        forwarding_routes(front),
        model_list_routes(front),
        operation_routes(front, metrics),
        page_routes(front.config),
    ):
        app.include_router(router)
    add_guards(app, config, front.drain, metrics.count_refusal)
    add_error_handlers(app)
    return app, metrics


async def _load_pinned(front: Front) -> None:
    for model in list(front.models.models.values()):
        if model.pinned:
            with suppress(LoadError, NoRoomError):  # the log has said it
                await front.models.load(model)
