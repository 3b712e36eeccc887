"""What the front of a cluster and its replicas tell each other."""

from dataclasses import dataclass
from enum import Enum
from typing import cast

from engine.types import EngineLimits, EngineStats, TokenConstraint, TokenEvent
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.constraint_spec import ConstraintSpec

Numbered = tuple[int, TokenEvent]
"""An event, and the number of the answer to the prompt that it is of."""


class Refusal(Enum):
    """Why a replica does not take a request: it has no room now, or its engine has ended."""

    FULL = "full"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself, from time to time."""

    name: str
    """Which no other replica has had."""
    host: str
    """The name of its machine."""
    limits: EngineLimits
    stats: EngineStats
    capacity: int
    """Requests that may run or wait there at the same time."""
    step_age_s: float
    pressure: int


@dataclass(slots=True)
class Route:
    """Which replica a call may go to. The caller and the router share it, on a thread each."""

    text: str = ""
    """A character for each full block of the prompt: equal prefixes have equal ones."""
    without: frozenset[str] = frozenset()
    """Replicas that are not to be chosen."""
    target: str | None = None
    """The only one that may be, if any."""
    replica: str | None = None
    """The one that was chosen last."""
    replicas: tuple[str, ...] = ()
    """Those that there were."""

    def allows(self, replica: str) -> bool:
        return replica == self.target if self.target is not None else replica not in self.without


@dataclass(frozen=True, slots=True, repr=False)
class SentForm:
    """A constraint as it is sent, in place of a compiled one: the replica compiles it."""

    spec: ConstraintSpec
    begun: str
    """The content that the answer has begun with."""


class SendingCompiler(GrammarCompiler):
    """Compiles forms to find out whether they can be enforced, before an answer begins."""

    async def compile(self, spec: ConstraintSpec, begun: str = "") -> TokenConstraint | None:
        constraint = await super().compile(spec, begun)
        return None if constraint is None else cast(TokenConstraint, SentForm(spec, begun))
