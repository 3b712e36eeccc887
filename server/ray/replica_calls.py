"""Defines the calls from a cluster's HTTP server to its replicas, and sends them."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.types import EngineLimits, EngineStats, Request, TokenEvent
from server.text.grammar.constraint_spec import ConstraintSpec

NumberedEvent = tuple[int, TokenEvent]
"""(index of an answer among the prompt's answers, event of this answer)"""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's state. Ray chooses ``name``, and gives it to no other replica."""

    name: str
    host: str
    limits: EngineLimits
    stats: EngineStats
    capacity: int
    """Number of requests that may run or wait in the replica at the same time."""
    step_age_s: float
    pressure: int


@dataclass(slots=True)
class Route:
    """Limits the replicas that a call may go to. A Route is shared by the caller and the router."""

    text: str = ""
    """One character for each full block of the prompt. Equal prefixes give equal characters."""
    without: frozenset[str] = frozenset()
    """Names of the replicas that the router must not choose."""
    target: str | None = None
    """Name of the only replica that the router may choose, or None."""
    replica: str | None = None
    """Name of the replica that the router chose last, or None."""
    replicas: tuple[str, ...] = ()
    """Names of all replicas that the router knew when it chose last."""

    def allows(self, replica: str) -> bool:
        return replica == self.target if self.target is not None else replica not in self.without


@dataclass(frozen=True, slots=True, repr=False)
class UncompiledConstraint:
    """An answer's grammar, which the replica that generates the answer will compile."""

    spec: ConstraintSpec
    begun: str
    """The part of the answer that the prompt already contains."""


class RayReplicas:
    """Calls replicas that ``router.py`` chooses. Any exception means that a replica is lost."""

    def __init__(self, handle: Any) -> None:
        """``handle`` is Ray's DeploymentHandle of the replicas."""
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(
        self, route: Route, request: Request
    ) -> AsyncGenerator[list[NumberedEvent] | str, None]:
        """Yield a replica's lists of events, or the reason for which the replica refuses the
        prompt: REPLICAS_FULL or REPLICA_LOST. Closing the generator aborts the answers."""
        response = self._streaming.generate.remote(route, request)
        with _cancel_on_leaving(response):
            async for batch in response:
                yield batch

    async def ask(self, method: str, route: Route) -> Any:
        response = self._handle.options(method_name=method).remote(route)
        with _cancel_on_leaving(response):
            return await response


@contextmanager
def _cancel_on_leaving(response: Any) -> Iterator[None]:
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        response.cancel()
        raise
