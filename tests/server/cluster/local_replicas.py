"""Replicas in this process: real engines behind what a handle does, which fail when told to."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from engine.client import EngineClient
from engine.memory_map import MemoryMap
from engine.types import Submission, TokenConstraint
from server.cluster.messages import Numbered, Refusal, ReplicaReport, Route
from server.cluster.replica import EngineReplica
from server.cluster.routing import Routing
from server.text.grammar.constraint_spec import ConstraintSpec
from tests.engines import recall_client


class NoGrammars:
    """Holds answers to nothing, or fails as it is told."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.asked: list[str] = []

    async def compile(self, spec: ConstraintSpec, begun: str = "") -> TokenConstraint | None:
        self.asked.append(begun)
        if self.failure is not None:
            raise self.failure
        return None


class LocalReplicas:
    """Several engines, chosen as on Ray."""

    def __init__(self, count: int, **changes: object) -> None:
        self.clients = [recall_client(**changes) for _ in range(count)]
        for client in self.clients:
            client.attach()
        self.grammars = NoGrammars()
        self.replicas = {
            f"r{number}": EngineReplica(f"r{number}", "here", client, self.grammars, 5.0)
            for number, client in enumerate(self.clients)
        }
        self.routing = Routing()
        self.hung: set[str] = set()
        self.dead: set[str] = set()
        self.dies_after: int | None = None
        """Batches of an answer, and then its replica is lost."""
        self.ends_early = False
        """Whether its stream just ends then."""
        self.chosen: list[str] = []
        self.hashes: list[Sequence[bytes]] = []
        """Of the prompts, as the router was given them."""
        self.update()

    def update(self) -> None:
        """Tell the router who there is."""
        self.routing.update({name: {} for name in self.replicas if name not in self.dead})

    def forget(self, name: str) -> None:
        """Have another engine answer for a replica, whose cache is another one, and tell nobody."""
        other = next(client for its, client in self._by_name() if its != name)
        self.replicas[name] = EngineReplica(name, "here", other, self.grammars, 5.0)

    def _by_name(self) -> list[tuple[str, EngineClient]]:
        return [(name, self.client(name)) for name in self.replicas]

    def client(self, name: str) -> EngineClient:
        """The engine of a replica."""
        return self.clients[int(name[1:])]

    async def _chosen(self, route: Route) -> EngineReplica:
        while (name := self.routing.choose(route)) is None:
            await asyncio.sleep(0.01)
        if name in self.dead:
            raise ConnectionError
        if name in self.hung:
            await asyncio.sleep(3600)
        return self.replicas[name]

    async def generate(
        self, route: Route, submission: Submission
    ) -> AsyncGenerator[list[Numbered] | Refusal, None]:
        replica = await self._chosen(route)
        assert route.replica is not None
        self.chosen.append(route.replica)
        self.hashes.append(route.hashes)
        left = self.dies_after
        stream = replica.generate(submission)
        try:
            async for batch in stream:
                yield batch
                if left is not None and batch:
                    left -= 1
                    if left <= 0 and self.ends_early:
                        return
                    if left <= 0:
                        raise ConnectionError
        finally:
            await stream.aclose()

    async def report(self, route: Route) -> ReplicaReport:
        return (await self._chosen(route)).report()

    async def memory_map(self, route: Route) -> MemoryMap:
        name = self.routing.choose(route)
        assert name is not None
        return await self.client(name).memory_map()

    def stop(self) -> None:
        """End all engines."""
        assert all(client.stop(10.0) for client in self.clients)
