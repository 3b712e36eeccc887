"""GET /cluster/replicas: the replicas of a cluster. A server without replicas has no such route."""

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.responses import Response

from server.routes.service import Service

JSON = "application/json"
PATH = "/cluster/replicas"
DESCRIPTION = (
    "The replicas of the cluster, each as it was when it said so last: its machine, whether it "
    "answers, what runs and waits there, blocks of its cache, and counts of tokens since its start."
)


def replica_routes(service: Service) -> APIRouter:
    """Return the route, for one service; nothing where it has no replicas."""
    router = APIRouter()
    if (listed := service.replicas) is None:
        return router

    @router.get(
        PATH,
        description=DESCRIPTION,
        responses={200: {"content": {JSON: {"schema": {"type": "object"}}}}},
    )
    async def replicas() -> Response:
        body = to_json({"model": service.model.id, "replicas": listed()})
        return Response(body, media_type=JSON, headers={"Cache-Control": "no-store"})

    return router
