"""Decides how many drafts (tokens that are likely to follow a sequence's newest one) to verify.

Two measured things decide: how long steps take, by their number of rows, and how many of a
sequence's drafts were kept lately. Where drafts do not pay, they rest."""

from dataclasses import dataclass
from typing import Protocol

from engine.step.sequence import FIRST_ACCEPTANCE, Sequence

MAX_DRAFTS = 7
# The weight of one draft, and of one measured step, in an average.
DRAFT_WEIGHT, STEP_WEIGHT = 0.15, 0.2
# What a row adds to a step, as a share of a step of one row, until it is measured.
FIRST_ROW_COST = 0.1
# Drafts rest unless they promise this many times the tokens per second.
LEAST_GAIN = 1.05
# Where drafts rest, the acceptance comes back by this share at each chance.
RECOVERY = 0.002


class Drafter(Protocol):
    """A source of drafts. ``running`` is the number of sequences that share steps."""

    def may_follow(self, sequence: Sequence, running: int) -> bool:
        """Return True if drafts are likely to follow the token that the step in flight samples."""

    def propose(self, sequence: Sequence, room: int, running: int) -> tuple[int, ...]:
        """Return up to ``room`` drafts after the sequence's newest token."""

    def note(self, sequence: Sequence, drafts: int, kept: int) -> None:
        """Note how many of the drafts that ``propose`` returned were kept."""

    def observe(self, rows: int, seconds: float) -> None:
        """Note how long a step without chunks of prompts took, by its number of rows."""


class RowCosts:
    """How long steps take, by their number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        before = self._seconds.get(rows, seconds)
        self._seconds[rows] = before + STEP_WEIGHT * (seconds - before)

    def ratio(self, rows: int, more: int) -> float:
        """Return the time of a step with ``rows + more`` rows, by that of one with ``rows``."""
        return self._estimate(rows + more) / self._estimate(rows)

    def _estimate(self, rows: int) -> float:
        def assumed(number: int) -> float:
            return 1 + FIRST_ROW_COST * (number - 1)

        if not self._seconds:
            return assumed(rows)
        nearest = min(self._seconds, key=lambda known: abs(known - rows))
        return self._seconds[nearest] * assumed(rows) / assumed(nearest)


@dataclass(slots=True)
class TextDrafts:
    """Takes drafts from the client's prediction, and from the prompt and the answer."""

    costs: RowCosts

    def may_follow(self, sequence: Sequence, running: int) -> bool:
        likely = sequence.likely_next(MAX_DRAFTS + 1)[1:]  # the first one is in flight
        return self._depth(sequence, len(likely), running) > 0

    def propose(self, sequence: Sequence, room: int, running: int) -> tuple[int, ...]:
        likely = sequence.likely_next(min(room, MAX_DRAFTS))
        return likely[: self._depth(sequence, len(likely), running)]

    def note(self, sequence: Sequence, drafts: int, kept: int) -> None:
        for is_kept in (*(1.0,) * kept, *(0.0,) * (kept < drafts)):
            sequence.acceptance += DRAFT_WEIGHT * (is_kept - sequence.acceptance)

    def observe(self, rows: int, seconds: float) -> None:
        self.costs.observe(rows, seconds)

    def _depth(self, sequence: Sequence, limit: int, running: int) -> int:
        """Return the number of drafts, at most ``limit``, that gives the most tokens per second."""
        best, depth = LEAST_GAIN, 0
        tokens, likely = float(running), 1.0
        for number in range(1, limit + 1):
            likely *= sequence.acceptance
            tokens += likely
            gain = tokens / running / self.costs.ratio(running, number)
            if gain > best:
                best, depth = gain, number
        if limit and not depth:
            sequence.acceptance += RECOVERY * (FIRST_ACCEPTANCE - sequence.acceptance)
        return depth
