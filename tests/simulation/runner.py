"""A device without arithmetic: it writes and reads slots through the page map, and finishes late.

A step may touch its memory at any time until it has completed. Here it does so at once, and again,
as a check, when it completes: what it read and wrote must still be behind the same addresses. What
it samples is the host's when the step is read, and before that only the next step's.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, NamedTuple

from engine.step.health_check import HEALTH_CHECK_ID
from engine.step.pipeline import FAILURE_WINDOW_S
from engine.step.plan import (
    NOT_FINITE,
    Opened,
    Outcome,
    PendingState,
    PendingToken,
    PlanEntry,
    RowError,
    SamplingState,
    Scores,
    StepPlan,
    Token,
    Vector,
)
from engine.types import PrefixSalt
from kvcache.manager import KVCacheManager
from kvcache.slots import StateSegment
from tests.kvcache.blocks import SLOT_BYTES, Block, MistakeError
from tests.kvcache.managers import state_group
from tests.kvcache.strict_memory import StrictMemory
from tests.kvcache.strict_states import StrictStates
from tests.simulation.faults import DeviceFaults, SimulationError
from tests.simulation.recall import (
    Recall,
    next_token,
    score,
    slots_after,
    told,
    vector,
)
from tests.simulation.world import VOCAB, World

# Stands for the slot before rows that come out wrong.
SPOILT = 0xBAD0_BAD0_BAD0_BAD0


class InjectedFaultError(RuntimeError):
    """The device refuses a step."""


@dataclass(slots=True)
class Clock:
    """Seconds that pass only when they are added."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class _Access:
    """The slots of a buffer behind its first tokens, at a step."""

    seq_id: int
    memory: StrictMemory
    buffer: int
    epoch: int
    start: int
    tokens: int
    blocks: list[tuple[Block, bytes]]

    @property
    def held(self) -> bytes:
        return b"".join(part for _, part in self.blocks)


@dataclass(slots=True)
class _Step:
    """A step that has not completed."""

    epoch: int
    due: int
    """The tick at which it completes."""
    accesses: list[_Access]


class Computed(NamedTuple):
    """An entry whose rows are there."""

    entry: PlanEntry
    held: bytes
    """The slots of all its tokens."""
    is_bad: bool
    """Whether its result is not finite."""
    pools: bool
    """Whether its result is a vector."""


@dataclass(slots=True, eq=False)
class SlotStep:
    """A step in flight."""

    runner: "SlotRunner"
    plan: StepPlan
    epoch: int
    computed: list[Computed]
    """The entries that have a result."""
    fails: bool
    """Whether the fault is seen when the step is read, or when it is submitted."""
    fails_late: bool
    """Whether the fault is seen when tokens are chosen that needed a state."""
    results: list[Outcome] | None = None
    lost: bool = False
    """Whether the step before it has failed."""

    def submit(self, state: PendingState | None) -> None:
        if (state is not None) != self.plan.needs_state:
            raise SimulationError(f"step {self.epoch} is told of {state}")
        if state is None:
            return
        if self.lost or self.runner.flying != [self]:
            raise SimulationError(f"step {self.epoch} is told of tokens that nobody has read")
        made = state.result()
        if self.fails and self.fails_late:
            self.runner.flying.remove(self)
            self.runner.failed_late = self.plan
            self.runner.has_ended(self.epoch)
            self.runner.fail()
        self.choose(made)

    def choose(self, state: SamplingState) -> None:
        """Sample tokens, which the next step may read."""
        rows = sum(entry.sampling is not None for entry in self.plan.entries)
        if len(state.histories) != rows or (state.masks and len(state.masks.words) != rows):
            raise SimulationError(f"step {self.epoch} samples {rows} rows, and is told of others")
        self.results = self.runner.results(self.plan, self.computed, state)

    def read(self) -> list[Outcome]:
        if self.lost:
            raise SimulationError(f"step {self.epoch} is read, and the one before it failed")
        if self.results is None:
            raise SimulationError(f"step {self.epoch} is read before its tokens are chosen")
        self.runner.flying.remove(self)
        self.runner.has_ended(self.epoch)
        if self.fails or self.runner.fails_where_it_hurts(self.plan):
            for later in self.runner.flying:
                later.lost = True
            self.runner.failed = self.plan
            self.runner.fail()
        self.runner.note(self.plan, self.results)
        return self.results

    def cancel(self) -> None:
        self.runner.flying.remove(self)
        self.runner.faults.pending = False
        self.runner.complete_up_to(self.epoch)
        self.runner.note_dropped(self.plan)


@dataclass(slots=True)
class SlotRunner:
    """A ModelRunner on whole numbers."""

    kv: KVCacheManager
    memories: list[StrictMemory]
    """The memory of each group. All hold the same slots."""
    states: StrictStates | None
    """The states of a model with recurrent layers."""
    clock: Clock
    rng: Random
    world: World
    faults: DeviceFaults
    recall: Callable[[int], Recall]
    """The reference of a request."""
    is_live: Callable[[int], bool]
    """Whether a request has not ended."""
    pools: Callable[[int], bool]
    """Whether a request wants a vector, and no tokens."""
    completed_epoch: int = 0
    computed: int = 0
    """Rows computed since the start."""
    failed: StepPlan | None = None
    """The newest plan that failed, when it was begun or read."""
    failed_late: StepPlan | None = None
    """The newest plan that failed when it was submitted, which the next step reports."""
    waited: int = 0
    """Steps behind one in flight whose tokens waited for those of that one."""
    bad_rows: set[int] = field(default_factory=set)
    """Requests whose row came out as not finite."""
    computed_from: dict[int, int] = field(default_factory=dict)
    """The first token that was computed for a request; those before came from the cache."""
    newest: StepPlan | None = None
    trials: int = 0
    """Tokens of the engine's own trials of its model."""
    flying: list[SlotStep] = field(default_factory=list)
    """Steps that have not been read."""
    wasted: list[int] = field(default_factory=list)
    """Requests that had ended when a result of theirs was read."""
    dropped: dict[int, int] = field(default_factory=dict)
    """The end of the positions that a dropped step has written, by sequence. Another step writes
    these positions again."""
    spared: int = 0
    """Sequences that live on when a step of theirs was dropped."""
    set_back: int = 0
    """Those of them whose state goes back to a boundary."""
    _sampled: list[int | None] = field(default_factory=list)
    """The tokens of the newest step; None for rows that are not finite."""
    _sampled_by: int = 0
    """That step's number."""
    _salts: dict[int, PrefixSalt] = field(default_factory=dict)
    """By sequence."""
    _lives: dict[int, int] = field(default_factory=dict)
    """The number of each sequence's newest life: each has a buffer of its own."""
    _numbers: Iterator[int] = field(default_factory=count)
    _spoilt: set[int] = field(default_factory=set)
    """Requests of a step in flight that is going to fail, and those whose rows are bad there."""
    _wrong_states: set[int] = field(default_factory=set)
    """State slots that were written last behind rows that are wrong."""
    _ticks: int = 0
    _running: deque[_Step] = field(default_factory=deque)

    def tick(self) -> None:
        self._ticks += 1
        self._complete()

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> SlotStep:
        """Write and read every row's slots."""
        self.newest = plan
        self.waited += overlapped and plan.needs_state
        for decision in plan.decisions:
            if isinstance(decision, Opened):
                self._salts[decision.seq_id] = decision.request.salt
                self._lives[decision.seq_id] = next(self._numbers)
                self.dropped.pop(decision.seq_id, None)
        if not overlapped:
            self._sampled = []
        views = self.kv.views(plan.segments)
        lag = self.rng.randint(0, self.world.longest_lag)
        step = _Step(views.epoch, self._ticks + lag, [])
        self._running.append(step)
        fails_at = self.faults.place_of_failure(len(plan.entries))
        by_group: Any = views.rows
        buffers = [tuple(s.buffer for s in of_entry) for of_entry in zip(*by_group, strict=True)]
        try:
            computed = self._compute_all(plan, buffers, step, fails_at, views.states)
        except InjectedFaultError:
            self.has_ended(views.epoch)
            raise
        finally:
            self._complete()
        self.computed += sum(entry.count for entry in plan.entries)
        fails = fails_at is not None
        late = fails_at is not None and fails_at % 2 == 0 and plan.needs_state
        self.flying.append(SlotStep(self, plan, views.epoch, computed, fails, late))
        if not plan.needs_state:
            rows = sum(entry.sampling is not None for entry in plan.entries)
            self.flying[-1].choose(SamplingState(None, [None] * rows))
        return self.flying[-1]

    def fail(self) -> None:
        self._spoilt = set()
        if not self.world.failures_end_engine and self.faults.failed_at:
            self.clock.now = max(self.clock.now, self.faults.failed_at[-1] + 2 * FAILURE_WINDOW_S)
        self.faults.fail()
        raise InjectedFaultError("the device refuses the step")

    def note(self, plan: StepPlan, results: list[Outcome]) -> None:
        """Note that the host reads a step: time has passed."""
        asked = [entry for entry in plan.entries if entry.has_outcome]
        for entry, result in zip(asked, results, strict=True):
            if not self.is_live(entry.seq_id):
                self.wasted.append(entry.seq_id)
                continue
            self.trials += entry.seq_id == HEALTH_CHECK_ID and entry.sampling is not None
            if result is NOT_FINITE:
                self.bad_rows.add(entry.seq_id)
        rows = sum(entry.count for entry in plan.entries)
        seconds = self.world.step_s + rows * self.world.token_s
        self.clock.now += seconds * self.rng.uniform(0.5, 2.0)

    def has_ended(self, epoch: int) -> None:
        """Note that a step was read or cannot begin: nothing of it runs any more, and where memory
        is mapped at mapping points, the host goes by that."""
        if not self.memories[0].maps_while_running:
            self.complete_up_to(epoch)

    def complete_up_to(self, epoch: int) -> None:
        for step in self._running:
            step.due = self._ticks if step.epoch <= epoch else step.due
        self._complete()

    def fails_where_it_hurts(self, plan: StepPlan) -> bool:
        """Return whether a step that seemed well fails when it is read, as the step behind it goes
        on with other sequences, which must live on."""
        here = {entry.seq_id for entry in plan.entries}
        later = [entry for step in self.flying for entry in step.plan.entries]
        goes_on = any(entry.start and entry.seq_id not in here for entry in later)
        return goes_on and self.faults.fails_late()

    def note_dropped(self, plan: StepPlan) -> None:
        """Note that nothing of a step counts, as the one before it has failed."""
        assert self.failed is not None
        failed = {entry.seq_id for entry in self.failed.entries}
        size = self.world.layout.tokens_per_block
        for entry in plan.entries:
            self.dropped[entry.seq_id] = entry.start + entry.count
            if entry.seq_id not in failed and self.is_live(entry.seq_id):
                self.spared += 1
                self.set_back += self.states is not None and entry.start % size > 0

    def check_states(self) -> None:
        """Check that no prompt can find a state behind rows that are wrong."""
        slots = [] if self.states is None else state_group(self.kv).pool.slots
        found = {slot.number for slot in slots if slot.digest is not None}
        if wrong := found & self._wrong_states:
            raise SimulationError(f"wrong states can be found in slots {sorted(wrong)}")

    def release_cache(self) -> None:
        """It keeps none."""

    # --- inside ---------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Complete the steps that are due, in order."""
        while self._running and self._running[0].due <= self._ticks:
            step = self._running.popleft()
            for access in step.accesses:
                self._check_unchanged(step.epoch, access)
            self.completed_epoch = step.epoch
            for memory in self.memories:
                memory.completed_epoch = step.epoch
            if self.states is not None:
                self.states.completed_epoch = step.epoch

    def _compute_all(
        self,
        plan: StepPlan,
        buffers: list[tuple[int, ...]],
        step: _Step,
        fails_at: int | None,
        segments: Any,
    ) -> list[Computed]:
        """Raise InjectedFaultError before, between or after the entries, unless the fault is seen
        when the step is submitted or read."""
        computed: list[Computed] = []
        fails = fails_at is not None
        for number, (entry, places) in enumerate(zip(plan.entries, buffers, strict=True)):
            self.computed_from.setdefault(entry.seq_id, entry.start)
            if number == fails_at:
                break
            is_bad = not fails and entry.has_outcome and self._is_bad(entry)
            accesses, is_spoilt = self._compute(entry, places, step.epoch, spoilt=fails or is_bad)
            if self.states is not None:
                self._recur(entry, segments[number], accesses[0], is_spoilt)
            step.accesses += accesses
            if entry.has_outcome:
                pools = entry.sampling is not None and self.pools(entry.seq_id)
                computed.append(Computed(entry, accesses[0].held, is_spoilt, pools))
        if fails_at is not None and fails_at <= len(plan.entries):
            self.failed = plan
            self.fail()
        spoilt = [each.entry for each in computed if each.is_bad]
        self._spoilt = {entry.seq_id for entry in (plan.entries if fails else spoilt)}
        return computed

    def results(
        self, plan: StepPlan, computed: list[Computed], state: SamplingState
    ) -> list[Outcome]:
        """Return the results of a step's entries; the next step may read its tokens from now on."""
        results: list[Outcome] = []
        sampled: list[int | None] = []
        for each in computed:
            results.append(self._result(each, len(sampled), state))
            if each.entry.sampling is not None:
                sampled.append(_token_of(results[-1]))
        self._sampled, self._sampled_by = sampled, plan.number
        return results

    def _is_bad(self, entry: PlanEntry) -> bool:
        """Return whether a row is wrong: a broken model has none right; another one always knows
        what follows 0."""
        if self.world.model_is_broken or entry.seq_id == HEALTH_CHECK_ID:
            return self.world.model_is_broken
        return self.faults.is_bad_row()

    def _compute(
        self, entry: PlanEntry, buffers: tuple[int, ...], epoch: int, spoilt: bool
    ) -> tuple[list[_Access], bool]:
        """Return the rows of an entry: each slot follows from the one before it, as the cache has
        it. spoilt: the rows are wrong, and must be seen by no request; also what follows them."""
        seq_id, start, end = entry.seq_id, entry.start, entry.start + entry.count
        tokens = self._tokens(entry)
        dropped = self.dropped.pop(seq_id, start)
        spoilt = spoilt or None in tokens or seq_id in self._spoilt
        accesses = []
        for memory, buffer in zip(self.memories, buffers, strict=True):
            memory.forget(buffer, start, dropped - start)
            last = SPOILT if spoilt else memory.slot(buffer, start - 1) if start else 0
            slots = slots_after(last, [token or 0 for token in tokens])
            life = self._lives[seq_id]
            memory.write(buffer, start, slots, epoch, self._salts[seq_id], life)
            blocks = memory.read(buffer, end, start)
            accesses.append(_Access(seq_id, memory, buffer, epoch, start, end, blocks))
            if not spoilt:
                self._check_contents(accesses[-1])
        return accesses, spoilt

    def _recur(
        self, entry: PlanEntry, segment: StateSegment, access: _Access, is_spoilt: bool
    ) -> None:
        """Write the states of an entry: after a token it is the content of its slot. Where rows are
        wrong, the state is wrong as well, and no sequence may go on from it."""
        assert self.states is not None
        slots = array("Q", access.held)

        def after(rows: int) -> int:
            end = entry.start + rows
            wrong = SPOILT if is_spoilt and rows > 0 else 0
            return (slots[end - 1] if end else 0) ^ wrong

        written = {slot for _, slot in segment.writes}
        if is_spoilt:
            self._wrong_states |= written
        else:
            self._wrong_states -= written
        life = self._lives[entry.seq_id]
        if not (is_spoilt and entry.seq_id in self._spoilt):
            self.states.advance(segment, entry.start, life, access.epoch, after)

    def _tokens(self, entry: PlanEntry) -> list[int | None]:
        """Return an entry's tokens; None for one that is not finite."""
        if not isinstance(entry.tokens, PendingToken):
            return [*entry.tokens]
        if entry.tokens.step != self._sampled_by:
            raise SimulationError(f"{entry} waits for a step that is not the one before")
        return [self._sampled[entry.tokens.row]]

    def _check_contents(self, access: _Access) -> None:
        seq_id = access.seq_id
        for block, _ in access.blocks:
            if block.owner != self._salts[seq_id]:
                raise SimulationError(
                    f"request {seq_id} reads {block}, which belongs to {block.owner}"
                )
        held = access.held
        want = self.recall(seq_id).slots(access.tokens)
        want = want[len(want) - len(held) :]
        if held != want:
            pairs = zip(array("Q", held), array("Q", want), strict=True)
            slot = next(slot for slot, (here, there) in enumerate(pairs) if here != there)
            raise SimulationError(
                f"request {seq_id} finds something else in slot {slot} of {access.tokens}"
            )

    def _check_unchanged(self, epoch: int, access: _Access) -> None:
        name = f"request {access.seq_id}, step {epoch}, late:"
        try:
            blocks = access.memory.read(access.buffer, access.tokens, access.start)
        except MistakeError as error:
            raise SimulationError(f"{name} {error}") from None
        for (block, part), (now, part_now) in zip(access.blocks, blocks, strict=True):
            if block is not now or part != part_now:
                raise SimulationError(f"{name} {block} was replaced or overwritten")

    def _result(self, computed: Computed, row: int, state: SamplingState) -> Outcome:
        """row: among those that sample."""
        entry, held, is_bad, pools = computed
        if is_bad:
            return NOT_FINITE
        if pools:
            return Vector(vector(held))
        then: Token | RowError | None = None
        if entry.sampling is not None:
            wanted = next_token(held, entry.sampling.params.seed, VOCAB)
            then = Token(told(wanted, state.histories[row], state.masks, row, VOCAB))
            if state.masks is not None and row in state.masks.broken:
                then = RowError(state.masks.broken[row])
        if entry.scoring is None:
            assert then is not None
            return then
        pairs = enumerate(entry.scoring.next_tokens, entry.scoring.start + 1)
        scores = tuple(score(held[: end * SLOT_BYTES], token) for end, token in pairs)
        return Scores(scores, then)


def _token_of(outcome: Outcome) -> int | None:
    """Return the token that was sampled; None where there is none."""
    if isinstance(outcome, Scores):
        return None if outcome.then is None else _token_of(outcome.then)
    return outcome.token_id if isinstance(outcome, Token) else None
