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

import mlx.core as mx
import numpy as np

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
    Verified,
)
from engine.types import PrefixSalt
from kvcache.backends.backend import Segment
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

    def cut(self, tokens: int) -> None:
        """Look after these tokens only."""
        self.tokens = tokens
        self.blocks = self.memory.read(self.buffer, tokens, self.start)


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
    wrong_from: int | None
    """The first of its sampled tokens that is not finite, or None."""
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
        rows = _sampled_rows(self.plan)
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
    kept: int = 0
    """Drafts that became tokens of an answer."""
    flying: list[SlotStep] = field(default_factory=list)
    """Steps that have not been read."""
    wasted: list[int] = field(default_factory=list)
    """Requests that had ended when a result of theirs was read."""
    dropped: dict[int, int] = field(default_factory=dict)
    """The end of the positions that a dropped step or drafts have written, by sequence. Another
    step writes those again that do not count."""
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
        views = self.kv.views(plan.segments, plan.drafts)
        lag = self.rng.randint(0, self.world.longest_lag)
        step = _Step(views.epoch, self._ticks + lag, [])
        self._running.append(step)
        fails_at = self.faults.place_of_failure(len(plan.entries))
        buffers = [*zip(*(_buffers(plan, rows) for rows in views.rows), strict=True)]
        try:
            computed = self._compute_all(plan, buffers, step, fails_at, views)
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
            self.flying[-1].choose(SamplingState(None, [None] * _sampled_rows(plan)))
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
            told = _until_stop(entry, result)
            if any(each is NOT_FINITE for each in told):
                self.bad_rows.add(entry.seq_id)
            if entry.drafts:
                self.kept += len(told) - 1
                self._reject(entry, len(told) - 1)
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
        if self.states is None:
            return
        slots = state_group(self.kv).pool.slots
        if wrong := self.states.wrong & {slot.number for slot in slots if slot.digest is not None}:
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
        views: Any,
    ) -> list[Computed]:
        """Raise InjectedFaultError before, between or after the entries, unless the fault is seen
        when the step is submitted or read."""
        computed: list[Computed] = []
        held: list[array[int]] = []
        wrong: list[int | None] = []
        fails = fails_at is not None
        for number, (entry, places) in enumerate(zip(plan.entries, buffers, strict=True)):
            self.computed_from.setdefault(entry.seq_id, entry.start)
            if number == fails_at:
                break
            wrong_from = 0 if fails else self._first_bad(entry) if entry.has_outcome else None
            accesses, wrong_from = self._compute(entry, places, step.epoch, wrong_from)
            step.accesses += accesses
            held.append(array("Q", accesses[0].held))
            wrong.append(wrong_from)
            if entry.has_outcome:
                pools = entry.sampling is not None and self.pools(entry.seq_id)
                computed.append(Computed(entry, accesses[0].held, wrong_from, pools))
        if self.states is not None:
            self._recur(plan, views, held, wrong)
        if views.hidden is not None:
            self._shift(plan, views, held)
        if fails_at is not None and fails_at <= len(plan.entries):
            self.failed = plan
            self.fail()
        # What follows drafts is planned when they were read: wrong rows may have been rejected.
        bad = [each for each in computed if each.wrong_from is not None]
        spoilt = [each.entry for each in bad if not each.entry.drafts]
        self._spoilt = {entry.seq_id for entry in (plan.entries if fails else spoilt)}
        return computed

    def results(
        self, plan: StepPlan, computed: list[Computed], state: SamplingState
    ) -> list[Outcome]:
        """Return the results of a step's entries; the next step may read its tokens from now on."""
        results: list[Outcome] = []
        sampled: list[int | None] = []
        for each in computed:
            rows = self._sample(each, len(sampled), state)
            results.append(_outcome(each, rows))
            sampled += [row.token_id if isinstance(row, Token) else None for row in rows]
        self._sampled, self._sampled_by = sampled, plan.number
        return results

    def _first_bad(self, entry: PlanEntry) -> int | None:
        """Return the first wrong one of an entry's sampled rows, or None: a broken model has none
        right; another one always knows what follows 0."""
        if self.world.model_is_broken or entry.seq_id == HEALTH_CHECK_ID:
            return 0 if self.world.model_is_broken else None
        return self.rng.randint(0, entry.drafts) if self.faults.is_bad_row() else None

    def _compute(
        self, entry: PlanEntry, buffers: tuple[int, ...], epoch: int, wrong_from: int | None
    ) -> tuple[list[_Access], int | None]:
        """Return the rows of an entry: each slot follows from the one before it, as the cache has
        it. wrong_from: the first sampled row that is wrong, and must be seen by no request; also
        what follows it. Where it is the first, so are all before it."""
        seq_id, start, end = entry.seq_id, entry.start, entry.start + entry.count
        tokens = self._tokens(entry)
        dropped = self.dropped.pop(seq_id, start)
        wrong_from = 0 if None in tokens or seq_id in self._spoilt else wrong_from
        good = len(tokens) if wrong_from is None else wrong_from
        newest = end - entry.drafts
        right = newest + self.recall(seq_id).count_right(newest, entry.draft_tokens)
        ids = [token or 0 for token in tokens]
        accesses = []
        for memory, buffer in zip(self.memories, buffers, strict=True):
            memory.forget(buffer, start, dropped - start)
            last = memory.slot(buffer, start - 1) if start and good else 0
            slots = slots_after(last, ids[:good]) + slots_after(SPOILT, ids[good:])
            life = self._lives[seq_id]
            memory.write(buffer, start, slots, epoch, self._salts[seq_id], life)
            blocks = memory.read(buffer, end, start)
            accesses.append(_Access(seq_id, memory, buffer, epoch, start, end, blocks))
            if good:
                self._check_contents(accesses[-1], min(start + good, right))
        return accesses, wrong_from

    def _recur(
        self, plan: StepPlan, views: Any, held: list["array[int]"], wrong: list[int | None]
    ) -> None:
        """Write the states of the entries that were computed. held: the slots of all their tokens.
        wrong: their first wrong rows."""
        pairs = zip(plan.entries, held, strict=False)
        rows = [slot for entry, slots in pairs for slot in slots[entry.start :]]
        rows += [0] * (sum(entry.count for entry in plan.entries) - len(rows))
        if views.draft_inputs is not None:
            views.draft_inputs.add(0, [mx.array(np.array(rows, np.uint64))])
        if views.replay is not None:
            (extended,) = views.replay.extend(0, [mx.array(np.array(rows, np.uint64))])
            if views.replay.own_rows(extended).tolist() != rows:
                raise SimulationError("rows change places where drafts are replayed")
            rows = extended.tolist()
        if len(rows) != sum(segment.count for segment in views.states):
            raise SimulationError(f"{len(rows)} rows advance the states {views.states}")
        first = 0
        for entry, segment, slots, bad in zip(
            plan.entries, views.states, held, wrong, strict=False
        ):
            seen = rows[first : first + segment.count]
            self._advance(entry, segment, views.epoch, slots, seen, is_spoilt=bad == 0)
            first += segment.count

    def _shift(self, plan: StepPlan, views: Any, held: list["array[int]"]) -> None:
        """Check the hidden state before each row: after a token it is the content of its slot."""
        rows = [
            slot
            for entry, slots in zip(plan.entries, held, strict=False)
            for slot in slots[entry.start :]
        ]
        missing = sum(entry.count for entry in plan.entries) - len(rows)
        states = np.array(rows + [0] * missing, np.uint64)
        before, known = views.shift(mx.array(states)[:, None])
        wanted = [
            slots[place - 1] if place else 0
            for entry, slots in zip(plan.entries, held, strict=False)
            for place in range(entry.start, entry.start + entry.count)
        ]
        found = (before * known)[: len(rows), 0].tolist()
        if found != wanted:
            raise SimulationError(f"hidden states before {plan.segments}: {found}, not {wanted}")

    def _advance(
        self,
        entry: PlanEntry,
        segment: StateSegment,
        epoch: int,
        slots: "array[int]",
        seen: list[int],
        *,
        is_spoilt: bool,
    ) -> None:
        """Write the states of an entry: after a token it is the content of its slot. Where rows are
        wrong, the state is wrong as well, and no sequence may go on from it. seen: the rows that
        the state sees: those of kept drafts, then the entry's."""
        assert self.states is not None
        begin = entry.start + entry.count - segment.count

        def after(rows: int) -> int:
            wrong = SPOILT if is_spoilt and begin + rows > entry.start else 0
            if rows > 0:
                return seen[rows - 1] ^ wrong
            return slots[begin + rows - 1] if begin + rows else 0

        written = {slot for _, slot in segment.writes}
        if is_spoilt:
            self.states.wrong |= written
        else:
            self.states.wrong -= written
        life = self._lives[entry.seq_id]
        if not (is_spoilt and entry.seq_id in self._spoilt):
            self.states.advance(segment, begin, life, epoch, after, entry.drafts)

    def _tokens(self, entry: PlanEntry) -> list[int | None]:
        """Return an entry's tokens; None for one that is not finite."""
        if not isinstance(entry.tokens, PendingToken):
            return [*entry.tokens]
        if entry.tokens.step != self._sampled_by:
            raise SimulationError(f"{entry} waits for a step that is not the one before")
        return [self._sampled[entry.tokens.row]]

    def _reject(self, entry: PlanEntry, kept: int) -> None:
        """Note that the next step writes the rows of rejected drafts again. It may begin before the
        device says that this one has completed."""
        end = self.dropped[entry.seq_id] = entry.start + entry.count
        for step in self._running:
            for access in step.accesses:
                if (access.seq_id, access.tokens) == (entry.seq_id, end):
                    self._check_unchanged(step.epoch, access)
                    access.cut(end - entry.drafts + kept)

    def _check_contents(self, access: _Access, tokens: int) -> None:
        """tokens: those behind which there are only drafts that must be rejected."""
        seq_id = access.seq_id
        for block, _ in access.blocks:
            if block.owner != self._salts[seq_id]:
                raise SimulationError(
                    f"request {seq_id} reads {block}, which belongs to {block.owner}"
                )
        held = access.held
        held = held[: len(held) - (access.tokens - tokens) * SLOT_BYTES]
        want = self.recall(seq_id).slots(tokens)
        want = want[len(want) - len(held) :]
        if held != want:
            pairs = zip(array("Q", held), array("Q", want), strict=True)
            slot = next(slot for slot, (here, there) in enumerate(pairs) if here != there)
            raise SimulationError(
                f"request {seq_id} finds something else in slot {slot} of {tokens}"
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

    def _sample(
        self, computed: Computed, first: int, state: SamplingState
    ) -> list[Token | Vector | RowError]:
        """Return what an entry samples. first: the first of its rows among those that sample."""
        entry, held, wrong_from, pools = computed
        rows: list[Token | Vector | RowError] = []
        for number, sampling in enumerate(entry.samplings):
            row, seen = first + number, len(held) - (entry.drafts - number) * SLOT_BYTES
            if wrong_from is not None and number >= wrong_from:
                rows.append(NOT_FINITE)
            elif pools:
                rows.append(Vector(vector(held)))
            elif state.masks is not None and row in state.masks.broken:
                rows.append(RowError(state.masks.broken[row]))
            else:
                noise = sampling.params.seed, sampling.num_generated
                wanted = next_token(held[:seen], *noise, VOCAB)
                token = told(wanted, state.histories[row], state.masks, row, VOCAB)
                rows.append(Token(token))
        return rows


def _outcome(computed: Computed, sampled: list[Any]) -> Outcome:
    """sampled: the entry's rows."""
    entry, held = computed.entry, computed.held
    if entry.drafts:
        return Verified.of(entry.draft_tokens, sampled)
    if computed.wrong_from is not None:
        return NOT_FINITE
    then: Any = sampled[0] if sampled else None
    if entry.scoring is None:
        assert isinstance(then, Token | Vector | RowError)
        return then
    pairs = enumerate(entry.scoring.next_tokens, entry.scoring.start + 1)
    return Scores(tuple(score(held[: end * SLOT_BYTES], token) for end, token in pairs), then)


def _until_stop(entry: PlanEntry, outcome: Outcome) -> list[Outcome]:
    """Return an entry's results in order, without those behind a stop token."""
    if not isinstance(outcome, Verified):
        return [outcome]
    assert entry.sampling is not None
    stops = entry.sampling.params.stop_token_ids
    ends = [n for n, each in enumerate(outcome.tokens, 1) if each[0] in stops]
    return [*outcome.tokens[: min(ends, default=None)]]


def _sampled_rows(plan: StepPlan) -> int:
    return sum(len(entry.samplings) for entry in plan.entries)


def _buffers(plan: StepPlan, segments: Any) -> list[int]:
    """Return each entry's buffer: its rows are a segment, or one segment each where there are
    drafts."""
    rest, buffers = iter(segments), []
    for entry in plan.entries:
        count = 1 if entry.drafts else entry.count
        own = [next(rest) for _ in range(1 + entry.drafts)]
        buffers.append(own[0].buffer)
        if own != [Segment(buffers[-1], entry.start + row, count) for row in range(len(own))]:
            raise SimulationError(f"the rows of {entry} lie in {own}")
    if any(rest):
        raise SimulationError("there are rows of no entry")
    return buffers
