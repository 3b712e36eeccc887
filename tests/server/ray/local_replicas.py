"""Replicas in this process: real engines behind what a handle does, which fail when told to."""

import asyncio
from collections.abc import AsyncGenerator
from itertools import takewhile
from typing import Any, cast

from engine.client import EngineClient
from engine.types import Request, TokenConstraint
from server.ray.replica import EngineReplica
from server.ray.replica_calls import (
    NumberedEvent,
    RayReplicas,
    Route,
    UncompiledConstraint,
)
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.constraints import CompiledGrammar
from tests.engines import recall_client


class NoGrammars(GrammarCompiler):
    """Holds answers to nothing, or fails as it is told."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.asked: list[str] = []

    async def compile(
        self, spec: ConstraintSpec, begun: str = "", grammar: CompiledGrammar | None = None
    ) -> TokenConstraint | None:
        self.asked.append(begun)
        if self.failure is not None:
            raise self.failure
        return None


class LocalReplicas(RayReplicas):
    """Several engines, of which the one that has had most of a prompt is chosen."""

    def __init__(self, count: int, **changes: object) -> None:
        self.clients = [recall_client(**changes) for _ in range(count)]
        for client in self.clients:
            client.attach()
        self.grammars = NoGrammars()
        self.replicas = {
            f"r{number}": EngineReplica(f"r{number}", client, self.grammars, 5.0)
            for number, client in enumerate(self.clients)
        }
        self.texts: dict[str, list[str]] = {name: [] for name in self.replicas}
        """What each has had."""
        self.hung: set[str] = set()
        self.dead: set[str] = set()
        self.dies_after: int | None = None
        """Events of an answer, and then its replica is lost."""
        self.ends_early = False
        """Whether its stream just ends then."""
        self.chosen: list[str] = []
        self.known: tuple[str, ...] = ()
        """Those that the router knows of."""
        self.update()

    def update(self) -> None:
        """Tell the router who there is."""
        self.known = tuple(name for name in self.replicas if name not in self.dead)

    def client(self, name: str) -> EngineClient:
        """The engine of a replica."""
        return self.clients[int(name[1:])]

    def _choose(self, route: Route) -> str | None:
        route.replicas = self.known
        allowed = [name for name in self.known if route.allows(name)]
        if not allowed:
            return None

        def held(name: str) -> int:
            return max((shared(route.text, its) for its in self.texts[name]), default=0)

        route.replica = max(allowed, key=lambda name: (held(name), -len(self.texts[name])))
        return route.replica

    async def _chosen(self, route: Route) -> EngineReplica:
        while (name := self._choose(route)) is None:
            await asyncio.sleep(0.01)
        if name in self.dead:
            raise ConnectionError
        if name in self.hung:
            await asyncio.sleep(3600)
        return self.replicas[name]

    async def generate(
        self, route: Route, submission: Request
    ) -> AsyncGenerator[list[NumberedEvent] | str, None]:
        replica = await self._chosen(route)
        assert route.replica is not None
        self.chosen.append(route.replica)
        self.texts[route.replica].append(route.text)
        left = self.dies_after
        stream = replica.generate(route, submission)
        try:
            async for batch in stream:
                if left is None or isinstance(batch, str):
                    yield batch
                    continue
                yield batch[:left]
                left -= len(batch[:left])
                if not left and self.ends_early:
                    return
                if not left:
                    raise ConnectionError
        finally:
            await stream.aclose()

    async def ask(self, method: str, route: Route) -> Any:
        return await getattr(await self._chosen(route), method)(route)

    def stop(self) -> None:
        """End all engines."""
        assert all(client.stop(10.0) for client in self.clients)


def shared(one: str, other: str) -> int:
    """How many first characters two texts share."""
    return len([*takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))])


def sent_form(begun: str) -> TokenConstraint:
    """A form that holds an answer to nothing, on its way."""
    return cast(TokenConstraint, UncompiledConstraint(ConstraintSpec(), begun))
