"""What the front of a cluster and its replicas tell each other."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from engine.types import EngineLimits, EngineStats, TokenConstraint, TokenEvent
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.constraint_spec import ConstraintSpec

NOT_HERE = "an answer that is sent elsewhere is followed there"


@dataclass(frozen=True, slots=True, repr=False)
class SentForm:
    """Stands for a constraint, as it is made from this: no engine of this process gets it."""

    spec: ConstraintSpec
    begun: str
    """The content that the answer has begun with."""

    def fill_mask(self, row: np.ndarray) -> bool:
        """Raise AssertionError."""
        raise AssertionError(NOT_HERE)

    def accept(self, token_id: int) -> None:
        """Raise AssertionError."""
        raise AssertionError(NOT_HERE)

    def copy(self) -> "SentForm":
        """Return itself: nothing of it changes."""
        return self


class SendingCompiler(GrammarCompiler):
    """Compiles forms to find out whether they can be enforced, before an answer begins."""

    async def compile(self, spec: ConstraintSpec, begun: str = "") -> TokenConstraint | None:
        """Return what stands for the constraint. Raises as GrammarCompiler's does."""
        constraint = await super().compile(spec, begun)
        return None if constraint is None else SentForm(spec, begun)


Numbered = tuple[int, TokenEvent]
"""An event, and the number of the answer to the prompt that it is of."""


class Refusal(Enum):
    """Why a replica does not take a request."""

    FULL = "full"
    """It has no room now."""
    ENDED = "ended"
    """Its engine has ended."""


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
        """Return whether a replica may be chosen."""
        return replica == self.target if self.target is not None else replica not in self.without
