"""Constraints of answers that are computed elsewhere: checked here, and compiled where the engine
is."""

from dataclasses import dataclass

import numpy as np

from engine.types import TokenConstraint
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
