"""Records the plans that an engine runs, and runs a record again: with the engine's model and cache
built anew, and without its scheduler."""

import json
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from engine.build import build_engine, plan_engine
from engine.config import EngineConfig
from engine.machine import MachineMemory
from engine.models.checkpoint import read_checkpoint
from engine.step.loop import EngineLoop
from engine.step.plan import (
    Attached,
    CacheDecision,
    Closed,
    Forked,
    InFlightStep,
    Opened,
    Outcome,
    PendingState,
    PendingToken,
    PlanEntry,
    SamplingState,
    Scores,
    StepPlan,
    StepRunner,
    Token,
    Verified,
)
from tests.engines import ON_CPU

# What the cache has decided holds again when memory has been unmapped behind it.
DECISION_LIMIT_S = 30.0
# So many times the memory of the record's engine.
ROOM = 8
MACHINE = MachineMemory(2**30, 2**30)
# Tokens by request, in order.
Tokens = dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class Begun:
    """A step was begun."""

    plan: StepPlan
    overlapped: bool


@dataclass(frozen=True, slots=True)
class Submitted:
    """The step of this number was submitted, with what its choice of tokens needed."""

    number: int
    state: SamplingState | None


@dataclass(frozen=True, slots=True)
class Read:
    """The step of this number was read."""

    number: int


Event = Begun | Submitted | Read


@dataclass(slots=True)
class Record:
    """What a runner did, and for which engine."""

    model: Path
    config: EngineConfig
    events: list[Event] = field(default_factory=list)


def made(state: SamplingState) -> PendingState:
    pending = PendingState()
    pending.set_result(state)
    return pending


@dataclass(slots=True)
class RecordedStep:
    """Stands before a step."""

    step: InFlightStep
    number: int
    record: Record

    def submit(self, state: PendingState | None) -> None:
        known = None if state is None else state.result()
        self.record.events.append(Submitted(self.number, known))
        self.step.submit(None if known is None else made(known))

    def read(self) -> Sequence[Outcome]:
        self.record.events.append(Read(self.number))
        return self.step.read()

    def cancel(self) -> None:
        raise AssertionError("a step that is recorded has failed")


class RecordingRunner:
    """Stands before an engine's runner."""

    def __init__(self, loop: EngineLoop, record: Record) -> None:
        self._runner: StepRunner = loop._runner
        self._record = record
        loop._runner = loop._pipeline._runner = self

    @property
    def completed_epoch(self) -> int:
        return self._runner.completed_epoch

    @completed_epoch.setter
    def completed_epoch(self, epoch: int) -> None:
        raise AssertionError("the runner's own")

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> InFlightStep:
        self._record.events.append(Begun(plan, overlapped))
        step = self._runner.begin(plan, overlapped=overlapped)
        return RecordedStep(step, plan.number, self._record)

    def release_cache(self) -> None:
        self._runner.release_cache()


def built(record: Record, emit: Callable[[list], None]) -> EngineLoop:  # type: ignore[type-arg]
    """The engine of a record."""
    plan = plan_engine(record.config, read_checkpoint(record.model), MACHINE, ON_CPU["posix"])
    return build_engine(plan, record.config, lambda *_: None, emit)


class Replay:
    """A model and a cache that do what a record says.

    What a cache evicts depends on when memory is mapped. This one has room for all, and finds what
    the record's had found.
    """

    def __init__(self, record: Record) -> None:
        budget = record.config.kv_budget_bytes
        assert budget is not None
        config = replace(record.config, kv_budget_bytes=ROOM * budget)
        loop = built(replace(record, config=config), lambda _: None)
        self._kv, self._runner = loop._kv, loop._runner
        self._begun: dict[int, tuple[StepPlan, InFlightStep]] = {}
        self._sampled: dict[PendingToken, int] = {}
        self._open: set[int] = set()
        self.tokens: Tokens = {}

    def run(self, events: Sequence[Event]) -> Tokens:
        """All of them, in order."""
        for event in events:
            if isinstance(event, Begun):
                self._begin(event)
            elif isinstance(event, Submitted):
                _, step = self._begun[event.number]
                step.submit(None if event.state is None else made(event.state))
            else:
                self._read(event.number)
        return self.tokens

    def _begin(self, event: Begun) -> None:
        starts = {seq_id: start for seq_id, start, _ in reversed(event.plan.segments)}
        for decision in event.plan.decisions:
            self._decide(decision, starts)
        for entry in event.plan.entries:
            end = entry.start + entry.count
            self._until(partial(self._kv.reserve, entry.seq_id, end, entry.drafts))
        step = self._runner.begin(event.plan, overlapped=event.overlapped)
        self._begun[event.plan.number] = event.plan, step

    def _decide(self, decision: CacheDecision, starts: Mapping[int, int]) -> None:
        """starts: where the plan's sequences begin to compute."""
        kv = self._kv
        if isinstance(decision, Opened):
            hashes = kv.block_hashes(decision.request.salt)
            hashes.extend(decision.token_ids, 0)
            hashes.max_cached_tokens = starts.get(decision.seq_id, decision.num_reusable)
            self._until(
                lambda: (
                    kv.open(
                        decision.seq_id,
                        hashes,
                        decision.num_tokens,
                        final_tokens=decision.final_tokens,
                        boundaries=decision.request.boundaries,
                    )
                    is not None
                )
            )
            self._open.add(decision.seq_id)
        elif isinstance(decision, Attached):
            self._until(lambda: kv.attach_cached(decision.seq_id) == decision.num_computed)
        elif isinstance(decision, Forked):
            ids = decision.parent_id, decision.seq_id
            self._until(lambda: kv.fork(*ids) == decision.num_computed)
        else:
            assert isinstance(decision, Closed)
            kv.close(decision.seq_id, keep_prefix=decision.keep_prefix)
            self._open.remove(decision.seq_id)

    def _read(self, number: int) -> None:
        plan, step = self._begun.pop(number)
        outcomes = iter(step.read())
        row = 0
        for entry in plan.entries:
            outcome = next(outcomes) if entry.has_outcome else None
            tokens = self._tokens_of(entry)
            if isinstance(outcome, Verified):
                tokens = tokens[: entry.count - entry.drafts + len(outcome.tokens) - 1]
            if entry.seq_id in self._open:
                self._kv.commit(entry.seq_id, tokens)
            for place, token in enumerate(_sampled(outcome), row):
                self._sampled[PendingToken(number, place)] = token
                self.tokens.setdefault(entry.seq_id, []).append(token)
            row += len(entry.samplings)
        self._kv.step_completed(self._runner.completed_epoch)

    def _tokens_of(self, entry: PlanEntry) -> Sequence[int]:
        if isinstance(entry.tokens, PendingToken):
            return [self._sampled[entry.tokens]]
        return entry.tokens

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DECISION_LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, "the cache decides otherwise than in the record"
            self._kv.step_completed(self._runner.completed_epoch)
            time.sleep(0.001)


def _sampled(outcome: Outcome | None) -> list[int]:
    """Return the tokens of an outcome."""
    if isinstance(outcome, Scores):
        outcome = outcome.then
    tokens = outcome.tokens if isinstance(outcome, Verified) else (outcome,)
    return [token.token_id for token in tokens if isinstance(token, Token)]


def main(path: str) -> None:
    """Prints the tokens of a record as JSON."""
    record: Record = pickle.loads(Path(path).read_bytes())
    json.dump(Replay(record).run(record.events), sys.stdout)
