"""The calls of a cluster's front to its replicas: the messages, and Ray's handle to send them."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.types import EngineLimits, EngineStats, Submission, TokenEvent
from server.text.grammar.constraint_spec import ConstraintSpec

NumberedEvent = tuple[int, TokenEvent]
"""The index of an answer to the prompt, and an event of it."""


class Refusal(Enum):
    """Why a replica does not take a request: it has no room now, or its engine has ended."""

    FULL = "full"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """How a replica is. Ray never gives its name to another one."""

    name: str
    host: str
    limits: EngineLimits
    stats: EngineStats
    capacity: int
    """Requests that may run or wait there at the same time."""
    step_age_s: float
    pressure: int


@dataclass(slots=True)
class Route:
    """Where a call may go. The caller and the router share it, each on a thread of its own."""

    text: str = ""
    """A character for each full block of the prompt: equal prefixes have equal ones."""
    without: frozenset[str] = frozenset()
    """Replicas that must not be chosen."""
    target: str | None = None
    """The only replica that may be chosen; None for any."""
    replica: str | None = None
    """The router's last choice."""
    replicas: tuple[str, ...] = ()
    """All replicas that the router knew then."""

    def allows(self, replica: str) -> bool:
        return replica == self.target if self.target is not None else replica not in self.without


@dataclass(frozen=True, slots=True, repr=False)
class UncompiledConstraint:
    """A constraint on its way: the replica compiles it."""

    spec: ConstraintSpec
    begun: str
    """The content that the answer has begun with."""


class RayReplicas:
    """Calls replicas by Ray's handle; ``router.py`` chooses which one. An exception means that the
    replica is lost."""

    def __init__(self, handle: Any) -> None:
        """handle: a DeploymentHandle."""
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def generate(
        self, route: Route, submission: Submission
    ) -> AsyncGenerator[list[NumberedEvent] | Refusal, None]:
        """Have a replica answer; leaving early aborts it."""
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
