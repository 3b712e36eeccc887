"""Calls from a cluster's front to its replicas: the messages, and the handle that sends them."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.types import EngineLimits, EngineStats, Submission, TokenEvent
from server.text.grammar.constraint_spec import ConstraintSpec

NumberedEvent = tuple[int, TokenEvent]
"""Index of an answer to the prompt, and an event of that answer."""


class Refusal(Enum):
    """Why a replica refuses a request: no room now, or its engine has ended."""

    FULL = "full"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's state. Ray never reuses a name."""

    name: str
    host: str
    limits: EngineLimits
    stats: EngineStats
    capacity: int
    """Requests that may run or wait at the same time."""
    step_age_s: float
    pressure: int


@dataclass(slots=True)
class Route:
    """Where a call may go. Shared by the caller's and the router's thread."""

    text: str = ""
    """One character per full block of the prompt: equal prefixes have equal characters."""
    without: frozenset[str] = frozenset()
    """Replicas not to choose."""
    target: str | None = None
    """The only replica to choose; None for any."""
    replica: str | None = None
    """The router's last choice."""
    replicas: tuple[str, ...] = ()
    """All replicas known to the router at its last choice."""

    def allows(self, replica: str) -> bool:
        return replica == self.target if self.target is not None else replica not in self.without


@dataclass(frozen=True, slots=True, repr=False)
class UncompiledConstraint:
    """A constraint that the replica will compile."""

    spec: ConstraintSpec
    begun: str
    """Text at the beginning of the answer, given by the prompt."""


class RayReplicas:
    """Calls replicas by Ray's handle; ``router.py`` chooses. An exception means a lost replica."""

    def __init__(self, handle: Any) -> None:
        """handle: Ray's DeploymentHandle."""
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(
        self, route: Route, submission: Submission
    ) -> AsyncGenerator[list[NumberedEvent] | Refusal, None]:
        """Yield a replica's events. Closing the generator aborts the answers."""
        response = self._streaming.generate.remote(route, submission)
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
