"""A device without arithmetic: it writes and reads slots through the page map, and finishes late.

A step may touch its memory at any time until it has completed. Here it does so at once, and again,
as a check, when it completes: what it read and wrote must still be behind the same addresses.
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from engine.model_trial import TRIAL_ID
from engine.step_plan import PlanEntry, StepPlan
from engine.types import Sampled, Sequence
from kvcache.manager import KVCacheManager
from tests.simulation.blocks import Block, SimulationError
from tests.simulation.faults import DeviceFaults
from tests.simulation.memory import SimulatedMemory
from tests.simulation.recall import (
    SLOT_BYTES,
    Recall,
    next_token,
    score,
    slots_after,
    vector,
)

# Stands for the slot before rows that come out wrong.
SPOILT = 0xBAD0_BAD0_BAD0_BAD0


class InjectedFaultError(RuntimeError):
    """The device refuses a step."""


@dataclass(slots=True)
class Clock:
    """Seconds, which pass when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """How a device behaves."""

    vocab_size: int
    longest_lag: int
    """Ticks until a step has completed, at most."""
    fault_rate: float
    bad_row_rate: float
    step_s: float
    token_s: float
    model_is_broken: bool = False
    """Whether no row is ever finite."""


@dataclass(slots=True)
class _Access:
    """What a step saw behind the first tokens of a buffer."""

    sequence: Sequence
    buffer: int
    tokens: int
    blocks: list[tuple[Block, bytes]]

    @property
    def held(self) -> bytes:
        """The slots of all its tokens."""
        return b"".join(part for _, part in self.blocks)


@dataclass(slots=True)
class _Step:
    """A step that has not completed."""

    epoch: int
    due: int
    """The tick at which it completes."""
    accesses: list[_Access]


@dataclass(slots=True)
class SimulatedRunner:
    """Runs plans like ModelRunner, on whole numbers."""

    kv: KVCacheManager
    memory: SimulatedMemory
    clock: Clock
    rng: Random
    traits: DeviceTraits
    faults: DeviceFaults
    recall: Callable[[int], Recall]
    """The reference of a request."""
    completed_epoch: int = 0
    computed: int = 0
    """Rows computed since the start."""
    failed: StepPlan | None = None
    """The newest plan that failed."""
    bad_rows: set[int] = field(default_factory=set)
    """Requests whose row came out as not finite."""
    computed_from: dict[int, int] = field(default_factory=dict)
    """The first token that was computed for a request; those before came from the cache."""
    newest: StepPlan | None = None
    trials: int = 0
    """Tokens of the engine's own trials of its model."""
    _ticks: int = 0
    _running: deque[_Step] = field(default_factory=deque)

    def tick(self) -> None:
        """Time passes for the device."""
        self._ticks += 1
        self._complete()

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Writes and reads every row's slots; one result for each entry that has one."""
        self.newest = plan
        views = self.kv.views([(e.sequence.seq_id, e.start, e.count) for e in plan.entries])
        lag = self.rng.randint(0, self.traits.longest_lag)
        step = _Step(views.epoch, self._ticks + lag, [])
        self._running.append(step)
        try:
            results = self._compute_all(plan, [s.buffer for s in views.segments], step)
        except InjectedFaultError:
            self.failed = plan
            raise
        finally:
            self._complete()
        asked = [entry for entry in plan.entries if entry.has_result]
        self.trials += sum(e.sequence.seq_id == TRIAL_ID and e.samples for e in asked)
        rows = sum(entry.count for entry in plan.entries)
        self.computed += rows
        seconds = self.traits.step_s + rows * self.traits.token_s
        self.clock.now += seconds * self.rng.uniform(0.5, 2.0)
        return results

    def free_cache(self) -> None:
        """It keeps none."""

    # --- inside ---------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Steps that are due complete, in order."""
        while self._running and self._running[0].due <= self._ticks:
            step = self._running.popleft()
            for access in step.accesses:
                self._check_unchanged(step.epoch, access)
            self.completed_epoch = self.memory.completed_epoch = step.epoch

    def _compute_all(self, plan: StepPlan, buffers: list[int], step: _Step) -> list[Sampled]:
        """Raises InjectedFaultError before, between or after the entries."""
        results = []
        fails_at = self.faults.place_of_failure(len(plan.entries))
        fails = fails_at is not None
        for number, (entry, buffer) in enumerate(zip(plan.entries, buffers, strict=True)):
            self.computed_from.setdefault(entry.sequence.seq_id, entry.start)
            if number == fails_at:
                break
            is_bad = not fails and entry.has_result and self._is_bad(entry)
            access = self._compute(entry, buffer, step.epoch, spoilt=fails or is_bad)
            step.accesses.append(access)
            if entry.has_result:
                results.append(self._result(entry, access, is_bad))
        if fails:
            raise InjectedFaultError("the device refuses the step")
        return results

    def _is_bad(self, entry: PlanEntry) -> bool:
        """A model that is broken gets nothing right; another one always knows what follows 0."""
        if self.traits.model_is_broken or entry.sequence.seq_id == TRIAL_ID:
            return self.traits.model_is_broken
        return self.faults.is_bad_row()

    def _compute(self, entry: PlanEntry, buffer: int, epoch: int, spoilt: bool) -> _Access:
        """The rows of an entry: each slot follows from the one before it, as the cache has it.
        spoilt: they come out wrong, and must not be seen by anybody."""
        sequence, start, end = entry.sequence, entry.start, entry.start + entry.count
        owner = sequence.request.salt
        last = self.memory.slot(buffer, start - 1) if start else 0
        slots = slots_after(SPOILT if spoilt else last, sequence.token_ids[start:end])
        self.memory.write(buffer, start, slots, epoch, owner)
        blocks = self.memory.read(buffer, end)
        access = _Access(sequence, buffer, end, blocks)
        if not spoilt:
            self._check_contents(access)
        return access

    def _check_contents(self, access: _Access) -> None:
        request = access.sequence.request
        for block, _ in access.blocks:
            if block.owner != request.salt:
                raise SimulationError(
                    f"request {request.request_id} reads {block}, which belongs to {block.owner}"
                )
        held = access.held
        want = self.recall(request.request_id).slots(access.tokens)
        if held != want:
            pairs = zip(array("Q", held), array("Q", want), strict=True)
            slot = next(slot for slot, (here, there) in enumerate(pairs) if here != there)
            raise SimulationError(
                f"request {request.request_id} finds something else in slot {slot} "
                f"of {access.tokens}"
            )

    def _check_unchanged(self, epoch: int, access: _Access) -> None:
        name = f"request {access.sequence.seq_id}, step {epoch}, late:"
        try:
            blocks = self.memory.read(access.buffer, access.tokens)
        except SimulationError as error:
            raise SimulationError(f"{name} {error}") from None
        for (block, part), (now, part_now) in zip(access.blocks, blocks, strict=True):
            if block is not now or part != part_now:
                raise SimulationError(f"{name} {block} was replaced or overwritten")

    def _result(self, entry: PlanEntry, access: _Access, is_bad: bool) -> Sampled:
        request, held = access.sequence.request, access.held
        if is_bad:
            self.bad_rows.add(request.request_id)
            return Sampled(None, scored=None if entry.scores else ())
        tokens = access.sequence.token_ids
        scores = tuple(
            score(held[: (place + 1) * SLOT_BYTES], tokens[place + 1]) for place in entry.scores
        )
        if not entry.samples:
            return Sampled(None, scored=scores)
        if request.pooling:
            return Sampled(None, embedding=vector(held))
        token = next_token(held, request.params.seed, self.traits.vocab_size)
        return Sampled(token, scored=scores)
