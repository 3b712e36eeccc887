"""Decides how many drafts (tokens that are likely to follow a sequence's newest one) to verify.

Drafts are taken from texts (draft_texts.py), or made by the model's own head (draft_head.py). Two
measured things decide: how long steps take, by their number of rows, and how many of a sequence's
drafts were kept lately. Where drafts do not pay, they rest."""

import time
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from engine.step.draft_head import DraftHead
from engine.step.row_costs import RowCosts
from engine.step.sequence import HEAD_RECOVERY, Acceptance, Sequence

MAX_DRAFTS = 7
# Deeper drafts of a head are rarely kept, as it was trained for one or two.
MAX_HEAD_DRAFTS = 4
# Of this many steps, PLAIN_STEPS have no drafts of a head, so that their time stays known.
MEASURED_STEPS, PLAIN_STEPS = 128, 3
# Drafts rest unless they promise this many times the tokens per second. Those of a head must make
# up for more: sequences that wait for them do without overlapped steps.
LEAST_GAIN, LEAST_HEAD_GAIN = 1.05, 1.15


class Drafter(Protocol):
    """A source of drafts. ``running`` is the number of sequences that share steps."""

    def may_follow(self, sequence: Sequence, running: int) -> bool:
        """Return True if drafts are likely to follow the token that the step in flight samples."""

    def depth(self, sequence: Sequence, room: int, running: int, *, idle: bool) -> int:
        """Return the number of drafts that pay after the sequence's newest token, up to ``room``.
        ``idle`` means that no step is in flight: a head runs only then, as it would wait for the
        step, and meet its errors."""

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Return up to as many drafts as wanted after each sequence's newest token. Memory for
        them is reserved."""

    def note(self, sequence: Sequence, drafts: int, kept: int) -> None:
        """Note how many of the drafts that ``propose`` returned were kept."""

    def observe(self, rows: int, seconds: float, interval_s: float) -> None:
        """Note how long a step without chunks of prompts took, alone and with its planning, by its
        number of rows."""


class _Choice(NamedTuple):
    """A number of drafts, and the tokens per second that they promise, by those without drafts."""

    gain: float
    depth: int


class Drafts:
    """Takes drafts from the client's prediction, from the prompt and the answer, and from the
    model's own head."""

    def __init__(self, costs: RowCosts, head: DraftHead | None = None) -> None:
        self.costs = costs
        self._head = head
        self._head_drafts = Acceptance()
        """Of all sequences: what a new one begins with."""
        self._steps = 0
        self._has_run_head = False
        """Whether the head has run since the last observed step."""

    def may_follow(self, sequence: Sequence, running: int) -> bool:
        if self._by_head(sequence, MAX_HEAD_DRAFTS, running).depth:
            return True
        likely = sequence.likely_next(MAX_DRAFTS + 1)[1:]  # the first one is in flight
        return self._by_text(sequence, len(likely), running).depth > 0

    def depth(self, sequence: Sequence, room: int, running: int, *, idle: bool) -> int:
        likely = sequence.likely_next(min(room, MAX_DRAFTS))
        by_text = self._by_text(sequence, len(likely), running)
        by_head = self._by_head(sequence, min(room, MAX_HEAD_DRAFTS) if idle else 0, running)
        is_head = by_head.depth > 0 and by_head > by_text
        sequence.drafted_by = self._of_head(sequence) if is_head else sequence.text_drafts
        return by_head.depth if is_head else by_text.depth

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        own = [each for each in wanted if each[0].drafted_by is each[0].head_drafts]
        by_head = iter(self._run_head(own) if own else [])
        return [
            next(by_head)
            if sequence.drafted_by is sequence.head_drafts
            else sequence.likely_next(depth)
            for sequence, depth in wanted
        ]

    def _run_head(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        assert self._head is not None, "the model has no head for drafts"
        started_s = time.perf_counter()
        drafts = self._head.propose(wanted)
        seconds = time.perf_counter() - started_s
        self._has_run_head = True
        self.costs.observe_pass(len(wanted), seconds / max(depth for _, depth in wanted))
        return drafts

    def note(self, sequence: Sequence, drafts: int, kept: int) -> None:
        sequence.drafted_by.note(drafts, kept)
        if sequence.drafted_by is sequence.head_drafts:
            self._head_drafts.note(drafts, kept)

    def observe(self, rows: int, seconds: float, interval_s: float) -> None:
        self.costs.observe(rows, seconds if self._has_run_head else interval_s)
        self._has_run_head = False
        self._steps += 1

    def _of_head(self, sequence: Sequence) -> Acceptance:
        if sequence.head_drafts is None:
            sequence.head_drafts = Acceptance(self._head_drafts.share)
        return sequence.head_drafts

    def _by_text(self, sequence: Sequence, limit: int, running: int) -> _Choice:
        """Choose a depth for one sequence beside others that draft nothing."""
        best, acceptance = _Choice(LEAST_GAIN, 0), sequence.text_drafts
        tokens, likely = float(running), 1.0
        for number in range(1, limit + 1):
            likely *= acceptance.share
            tokens += likely
            best = max(best, _Choice(tokens / running / self.costs.ratio(running, number), number))
        if limit and not best.depth:
            acceptance.recover()
        return best

    def _by_head(self, sequence: Sequence, limit: int, running: int) -> _Choice:
        """Choose a depth, as if all running sequences drafted alike."""
        best, acceptance = _Choice(LEAST_HEAD_GAIN, 0), self._of_head(sequence)
        is_plain = self._steps % MEASURED_STEPS < PLAIN_STEPS or not self.costs.knows(running)
        if self._head is None or is_plain:
            return best
        tokens = likely = 1.0
        for number in range(1, limit + 1):
            likely *= acceptance.share
            tokens += likely
            cost = self.costs.ratio(running, running * number)
            cost += number * self.costs.pass_ratio(running)
            best = max(best, _Choice(tokens / cost, number))
        if limit and not best.depth:
            acceptance.recover(HEAD_RECOVERY)
        return best
