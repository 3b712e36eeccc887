"""Reaches replicas by a handle of Ray Serve."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from engine.memory_map import MemoryMap
from engine.types import Submission
from server.cluster.messages import Numbered, Refusal, ReplicaReport, Route


class RayReplicas:
    """Calls methods of the replicas of a deployment. ``ray_router.py`` chooses."""

    def __init__(self, handle: Any) -> None:
        """handle: a DeploymentHandle."""
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(
        self, route: Route, submission: Submission
    ) -> AsyncGenerator[list[Numbered] | Refusal, None]:
        """Have a replica answer; leaving early aborts it."""
        response = self._streaming.generate.remote(route, submission)
        try:
            async for batch in response:
                yield batch
        except asyncio.CancelledError:
            response.cancel()
            raise
        except GeneratorExit:
            response.cancel()
            raise

    async def report(self, route: Route) -> ReplicaReport:
        found: ReplicaReport = await self._ask("report", route)
        return found

    async def memory_map(self, route: Route) -> MemoryMap:
        found: MemoryMap = await self._ask("memory_map", route)
        return found

    async def _ask(self, method: str, route: Route) -> Any:
        response = self._handle.options(method_name=method).remote(route)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
