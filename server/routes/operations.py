"""GET /version, /health, /ready and /metrics."""

from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

from server.chat.readiness import generates
from server.protocol.wire_errors import shutting_down, unavailable
from server.routes.replicas import PATH as REPLICAS
from server.routes.service import Service


def who_answers() -> dict[str, str]:
    """Who answers here, for people and programs that look before they ask."""
    return {"name": "quire", "version": version("quire"), "models": "/v1/models"}


def operation_routes(service: Service) -> APIRouter:
    """Return the routes, for one service."""
    router = APIRouter()
    client, drain, figures = service.client, service.drain, service.metrics

    @router.get("/version", include_in_schema=False)
    async def get_version() -> dict[str, str]:
        # The page looks here whether there is a list of replicas.
        return who_answers() | ({} if service.replicas is None else {"replicas": REPLICAS})

    @router.get("/health")
    async def health() -> Response:
        if not client.alive:
            raise unavailable("The engine has ended.")
        return JSONResponse({"status": "draining" if drain.draining else "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """Generates a token: a server whose engine is stuck is not ready."""
        if drain.draining:
            raise shutting_down(service.config.limits.retry_after_s)
        if not await generates(client, service.config.server.ready_timeout_s):
            raise unavailable("The engine did not generate a token in time.")
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        figures.set_draining(drain.draining)
        return Response(figures.render(), media_type=CONTENT_TYPE_LATEST)

    return router
