"""GET and HEAD /, /version, /health, /ready and /metrics."""

from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

from server.protocol.errors import unavailable
from server.service import Service


def operation_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter()

    async def root() -> dict[str, str]:
        """Who answers here, for people and programs that look before they ask."""
        return {"name": "quire", "version": version("quire"), "models": "/v1/models"}

    router.add_api_route("/", root, methods=["GET", "HEAD"], include_in_schema=False)
    router.add_api_route("/version", root, methods=["GET"], include_in_schema=False)

    @router.get("/health")
    async def health() -> Response:
        if not service.client.alive:
            raise unavailable("The engine has ended.")
        return JSONResponse({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """Generates a token: a server whose engine is stuck is not ready."""
        if not await service.canary():
            raise unavailable("The engine did not generate a token in time.")
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
