"""Chooses the state slots that steps read and write, and those kept for other sequences.

A state slot holds the states of all recurrent layers of one sequence at one position. The *base* of
a sequence is the slot of its last block boundary, and no step writes it any more. After the
boundary, every step overwrites a *working* slot::

    0 ............ base (a boundary) ....... computed
    sealed slots   | never written again     | working slot

A step that crosses a boundary also writes the states there to another slot, which becomes the base
when the step's results have been read. The old base is freed, or sealed for other sequences. If a
step is dropped, the working slot is lost, and less than a block of tokens is computed again."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvcache.backends.backend import StateMemory
from kvcache.block_hashes import BlockHashes
from kvcache.evictor import NOTHING_TO_EVICT, UseClock
from kvcache.groups.base import KVGroup, Loan, StepPlan, StepTokens
from kvcache.inspector import KVMap, map_slots
from kvcache.layout import SlotLayout
from kvcache.replay import DraftInputs, KeptDrafts, Replay
from kvcache.sequences import CachedSequence
from kvcache.slots import (
    ENDS_PER_CONVERSATION,
    SLOTS_PER_CONVERSATION,
    SLOTS_PER_SEQUENCE,
    Retention,
    Slot,
    SlotPool,
    StateSegment,
)
from kvcache.stats import KVStats, MissReason
from kvcache.views import KVViews

# In long prompts, the states are kept at each multiple of this number of tokens.
WAYPOINT_TOKENS = 4096


def planned_checkpoints(sequence: CachedSequence) -> dict[int, Retention]:
    """Return the positions at which to keep states, with the reasons. Each is the last block
    boundary before the end of the prompt, or of a part that the sequence's ``boundaries`` name."""
    hashes, boundaries = sequence.block_hashes, sequence.boundaries
    positions = (
        (hashes.num_tokens - 1, Retention.WAYPOINT),
        (boundaries.messages_end, Retention.END),
        (boundaries.user_end, Retention.USER),
        (boundaries.system_end, Retention.SYSTEM),
    )
    checkpoints = {tokens // hashes.tokens_per_block: retention for tokens, retention in positions}
    checkpoints.pop(0, None)
    return checkpoints


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The state slots of one open sequence."""

    sequence: CachedSequence
    checkpoints: dict[int, Retention]
    """The reasons for keeping states at block boundaries, by the number of leading blocks."""
    base: Slot | None = None
    """The slot of the last block boundary, or None at position 0, where all states are zero."""
    base_block: int = 0
    kept_block: int = 0
    """The number of blocks before the newest block boundary at which states are kept."""
    head: Slot | None = None
    """The slot that holds the newest states once all planned steps have run."""
    head_tokens: int = 0
    """The position of these states, in tokens."""
    drafts: tuple[DraftInputs, int] | None = None
    """The inputs of the newest step's drafts, and the index of the first of this sequence's."""
    working: Slot | None = None
    """The slot that steps overwrite, or None if the newest states are at a block boundary."""
    spare: list[Slot] = field(default_factory=list)
    """Reserved slots that no step writes yet."""
    steps: deque[list[tuple[int, Slot]]] = field(default_factory=deque)
    """``(leading blocks, slot)`` of the block boundaries whose states each planned step writes,
    ascending."""

    @property
    def held(self) -> list[Slot]:
        written = (slot for step in self.steps for _, slot in step)
        slots = (self.base, self.working, *self.spare, *written)
        return [slot for slot in slots if slot is not None]


@dataclass(slots=True)
class _Sealing:
    """A slot to seal when the step that wrote it has completed."""

    epoch: int
    slot: Slot
    sequence: CachedSequence
    block: int
    retention: Retention


class StateGroup(KVGroup):
    """The recurrent layers: their state slots of all sequences."""

    def __init__(
        self,
        layout: SlotLayout,
        memory: StateMemory,
        tokens_per_block: int,
        clock: UseClock,
        is_cached: Callable[[bytes], bool],
    ) -> None:
        """``is_cached`` returns True if K and V are cached up to the end of the block with this
        hash."""
        self._layout = layout
        self._memory = memory
        self._size = tokens_per_block
        self._is_cached = is_cached
        self.pool = SlotPool(memory.num_slots, memory.commit, clock)
        self._waypoint_blocks = max(1, WAYPOINT_TOKENS // tokens_per_block)
        self._open: dict[int, SequenceStates] = {}
        self._sealing: deque[_Sealing] = deque()
        self._loans: list[Loan] = []

    @property
    def recovering(self) -> bool:
        return bool(self._sealing) or self.pool.recovering

    # --- opening sequences ------------------------------------------------------------------------

    def can_begin(self, digest: bytes) -> bool:
        """Return True if a sequence can begin after the block with this hash."""
        return self.pool.find(digest) is not None

    def has_room(self, hashes: BlockHashes, num_tokens: int) -> bool:
        return SLOTS_PER_SEQUENCE * (len(self._open) + 1) <= len(self.pool.slots)

    def open(self, sequence: CachedSequence, position: int, wanted: int, *, alone: bool) -> bool:
        checkpoints = planned_checkpoints(sequence)
        if wanted > position:
            checkpoints = {wanted: Retention.END} | checkpoints
        self._open[sequence.seq_id] = SequenceStates(sequence, checkpoints)
        return self.attach(sequence.seq_id, position)

    def attach(self, seq_id: int, position: int, parent_id: int | None = None) -> bool:
        states = self._open[seq_id]
        if position == states.base_block:
            return True
        assert not states.steps, "a step would go on from another state"
        hashes = states.sequence.block_hashes
        slot = self.pool.find(hashes.digests[position - 1])
        assert slot is not None, "no state is cached here"
        slot.holders += 1
        self._drop_working(states)
        if states.base is not None:
            self.pool.let_go(states.base)
        states.base = states.head = slot
        states.base_block = states.kept_block = position
        states.head_tokens = position * self._size
        if slot.retention is Retention.USER:
            self.pool.leave(slot)
        slot.retention = max(slot.retention, states.checkpoints.get(position, slot.retention))
        self.pool.use(self._chain(hashes, position))
        return True

    def positions_to_share(self, seq_id: int) -> Collection[int]:
        return self._open[seq_id].checkpoints

    def explain(self, seq_id: int, cached_tokens: int) -> tuple[int, MissReason | None]:
        states, reason = self._open[seq_id], None
        hashes = states.sequence.block_hashes
        cached = min(cached_tokens // self._size, hashes.shareable_blocks)
        for digest in hashes.digests[states.base_block : cached]:
            if self.pool.find(digest):
                return cached_tokens, None
            if digest in self.pool.evicted:
                reason = MissReason.STATE_EVICTED
            reason = reason or MissReason.NO_STATE
        return cached_tokens, reason

    # --- running steps ----------------------------------------------------------------------------

    def reserve(self, seq_id: int, num_tokens: int, drafts: int = 0) -> bool:
        states = self._open[seq_id]
        start = states.head_tokens
        num_tokens -= drafts
        needed = self._needed(states, start, num_tokens)
        if states.steps and self._is_short:
            # The old base becomes free when the results of the step in flight are read. Taking a
            # slot earlier would evict states that save thousands of tokens.
            wanted = needed - len(states.spare) + self._num_planned(states, start, num_tokens)
            if wanted > self.pool.expendable:
                return False
        while len(states.spare) < needed:
            may_have = len(states.held) < SLOTS_PER_SEQUENCE or self._has_spare
            slot = self.pool.take() if may_have else None
            if slot is None:
                return False
            states.spare.append(slot)
        return True

    def _needed(self, states: SequenceStates, start: int, end: int) -> int:
        """Return the number of slots that a step writes and that the sequence does not have yet."""
        crosses, stays_within = end // self._size > start // self._size, end % self._size > 0
        if states.working is not None:
            # A step that ends at a block boundary turns its working slot into the next base.
            return int(crosses and stays_within)
        return int(crosses) + int(stays_within)

    def schedule(self, plan: StepPlan, epoch: int, views: KVViews) -> None:
        # This may allocate slots, whose memory must be there before the rows are made.
        kept = [self._kept_drafts(seq_id, start) for seq_id, start, _, _ in plan]
        slots = [self._schedule(each, epoch) for each in plan]
        views.states = self._memory.rows(slots, views.rows[0])
        if any(kept):
            views.replay = Replay(kept, [each.count for each in plan])
        if any(each.drafts for each in plan):
            views.draft_inputs = self._note_drafts(plan)

    def _kept_drafts(self, seq_id: int, start: int) -> KeptDrafts | None:
        """Return the drafts before token ``start`` of which no state is written yet."""
        states = self._open[seq_id]
        drafts, states.drafts = states.drafts, None
        if start == states.head_tokens:
            return None
        assert drafts is not None, "a state is missing"
        return KeptDrafts(*drafts, start - states.head_tokens)

    def _note_drafts(self, plan: StepPlan) -> DraftInputs:
        ends = accumulate(each.count for each in plan)
        rows = [range(end - each.drafts, end) for each, end in zip(plan, ends, strict=True)]
        inputs, first = DraftInputs([row for each in rows for row in each]), 0
        for segment in plan:
            if segment.drafts:
                self._open[segment.seq_id].drafts = inputs, first
                first += segment.drafts
        return inputs

    def _schedule(self, segment: StepTokens, epoch: int) -> StateSegment:
        states = self._open[segment.seq_id]
        start, end = states.head_tokens, segment.start + segment.count - segment.drafts
        read = states.head
        assert (read is None) == (start == 0), "a state is missing"
        crossed = self._cross(states, start, end)
        writes = [(block * self._size - start, slot) for block, slot in crossed]
        if end % self._size:
            if states.working is None:
                states.working = states.spare.pop()
            writes.append((end - start, states.working))
        states.head, states.head_tokens = writes[-1][1], end
        states.steps.append(crossed)
        count = end - start + segment.drafts
        for slot in (read, *(slot for _, slot in writes)):
            if slot is not None:
                slot.epoch = epoch
        numbers = tuple((rows, slot.number) for rows, slot in writes)
        return StateSegment(count, None if read is None else read.number, numbers)

    def _cross(self, states: SequenceStates, start: int, end: int) -> list[tuple[int, Slot]]:
        """Return ``(leading blocks, slot)`` of each boundary whose states the step writes: the last
        boundary and, if there are spare slots, others worth keeping."""
        first, last = start // self._size + 1, end // self._size
        if last < first:
            return []
        crossed = []
        for block in sorted(self._seals_within(states, first, last - 1)):
            retention, blocks = self._retention(states, block), block - states.kept_block
            assert retention is not None, "nobody wants this state"
            slot = self.pool.take_for(retention, blocks * self._size) if self._has_spare else None
            if slot is not None:
                crossed.append((block, slot))
                states.kept_block = block
        if self._retention(states, last) is not None:
            states.kept_block = last
        if end % self._size == 0 and states.working is not None:
            slot, states.working = states.working, None
        else:
            slot = states.spare.pop()
        return [*crossed, (last, slot)]

    def _seals_within(self, states: SequenceStates, first: int, last: int) -> set[int]:
        every = self._waypoint_blocks
        waypoints = range(-(-first // every) * every, last + 1, every)
        return {block for block in states.checkpoints if first <= block <= last} | {*waypoints}

    def _retention(self, states: SequenceStates, block: int) -> Retention | None:
        """Return the reason for keeping the states of a block boundary, or None."""
        waypoint = None if block % self._waypoint_blocks else Retention.WAYPOINT
        return states.checkpoints.get(block, waypoint)

    def _num_planned(self, states: SequenceStates, start: int, end: int) -> int:
        """Return the number of a step's checkpoints, except waypoints and the last boundary."""
        blocks = range(start // self._size + 1, end // self._size)
        planned = [block for block in states.checkpoints if block in blocks]
        return sum(states.checkpoints[block] is not Retention.WAYPOINT for block in planned)

    @property
    def _is_short(self) -> bool:
        """True if open sequences leave fewer slots than one conversation keeps."""
        held = SLOTS_PER_SEQUENCE * len(self._open)
        return len(self.pool.slots) - held < SLOTS_PER_CONVERSATION

    @property
    def _has_spare(self) -> bool:
        """True if taking one more slot leaves enough slots for all open sequences."""
        held = sum(max(SLOTS_PER_SEQUENCE, len(states.held)) for states in self._open.values())
        return held + len(self._sealing) + len(self._loans) < len(self.pool.slots)

    def settled(self, seq_id: int, end: int) -> int:
        return min(end, self._open[seq_id].head_tokens)  # no state is written after kept drafts yet

    def commit(self, seq_id: int, start: int, end: int, epoch: int) -> None:
        """Note that the oldest step's results were read. The step's last slot becomes the base."""
        states = self._open[seq_id]
        for block, slot in states.steps.popleft():
            if states.base is not None:
                self.pool.let_go(states.base)
            states.base, states.base_block = slot, block
            retention = self._retention(states, block)
            if retention is not None:
                self._seal_later(states, retention, epoch)

    def _seal_later(self, states: SequenceStates, retention: Retention, epoch: int) -> None:
        assert states.base is not None, "the beginning needs no slot"
        states.base.holders += 1
        sealing = _Sealing(epoch, states.base, states.sequence, states.base_block, retention)
        self._sealing.append(sealing)

    # --- dropping steps and closing sequences -----------------------------------------------------

    def cancel_steps(self, seq_id: int) -> int:
        states = self._open[seq_id]
        for step in states.steps:
            for _, slot in step:
                self.pool.let_go(slot)
        states.steps.clear()
        self._drop_working(states)
        states.head, states.drafts = states.base, None
        states.head_tokens = states.base_block * self._size
        return states.head_tokens

    def close(self, seq_id: int, epoch: int) -> None:
        """Queue the sequence's base slot for sealing, and stop using its other slots."""
        states = self._open[seq_id]
        self.cancel_steps(seq_id)
        for slot in states.spare:
            self.pool.let_go(slot)
        if states.base is not None:
            if states.base.digest is None:
                self._seal_later(states, Retention.END, epoch)
            elif states.sequence.keeps_prefix:
                states.base.retention = max(states.base.retention, Retention.END)
            self.pool.let_go(states.base)
        del self._open[seq_id]

    def _drop_working(self, states: SequenceStates) -> None:
        if states.working is not None:
            self.pool.let_go(states.working)
            states.working = None

    def step_completed(self, epoch: int, *, is_quiet: bool) -> None:
        """Seal the slots of completed steps. The blocks before these slots are sealed already."""
        while self._sealing and self._sealing[0].epoch <= epoch:
            item = self._sealing.popleft()
            self._seal(item)
            self.pool.let_go(item.slot)
        self.pool.advance(epoch)

    def _seal(self, item: _Sealing) -> None:
        """Seal a slot, if the K and V before it are cached and no slot has been sealed there."""
        hashes = item.sequence.block_hashes
        digest = hashes.digests[item.block - 1]
        if not item.sequence.keeps_prefix or not self._is_cached(digest):
            return
        if (sealed := self.pool.find(digest)) is not None:
            sealed.retention = max(sealed.retention, item.retention)
            return
        self.pool.seal(item.slot, digest, item.retention, item.block * self._size)
        chain = self._chain(hashes, item.block)
        self.pool.use(chain)
        before = [
            slot.conversation for slot in chain[:-1] if slot.retention is not Retention.SYSTEM
        ]
        item.slot.conversation = before[-1] if before else item.sequence.seq_id
        for kind, limit in ((Retention.END, ENDS_PER_CONVERSATION), (Retention.USER, 1)):
            for older in [slot for slot in chain if slot.retention is kind][:-limit]:
                older.retention = Retention.WAYPOINT

    def _chain(self, hashes: BlockHashes, position: int) -> list[Slot]:
        """Return the sealed slots of a sequence's first ``position`` blocks, in order."""
        slots = map(self.pool.find, hashes.digests[:position])
        return [slot for slot in slots if slot is not None]

    # --- records in files -------------------------------------------------------------------------

    def has(self, hashes: BlockHashes, number: int) -> bool:
        return self.can_begin(hashes.digests[number])

    def lend(self, sequence: CachedSequence, numbers: Sequence[int]) -> Loan | None:
        slot = self.pool.find(sequence.block_hashes.digests[numbers[0]])
        if slot is None or not self._has_spare:
            return None
        slot.holders += 1
        return self._loan(sequence, numbers, slot)

    def lend_empty(self, sequence: CachedSequence, numbers: range) -> Loan | None:
        slot = self.pool.take() if self._has_spare else None
        return None if slot is None else self._loan(sequence, numbers, slot)

    def _loan(self, sequence: CachedSequence, numbers: Sequence[int], slot: Slot) -> Loan:
        assert len(numbers) == 1, "a loan has one slot"
        place, memory = slot.number, self._memory
        loan = Loan(
            sequence,
            numbers,
            self._layout.slot_bytes,
            lambda _, fd: memory.write_record(place, fd, 0),
            lambda _, fd: memory.read_record(place, fd, 0),
            slot,
        )
        self._loans.append(loan)
        return loan

    def adopt(self, loan: Loan, numbers: Collection[int]) -> None:
        for number in numbers:
            self._seal(_Sealing(0, loan.memory, loan.sequence, number + 1, Retention.END))
            if self.has(loan.sequence.block_hashes, number):  # the blocks before it are cached
                loan.adopted.add(number)

    def end_loan(self, loan: Loan) -> None:
        self._loans.remove(loan)
        self.pool.let_go(loan.memory)

    # --- memory -----------------------------------------------------------------------------------

    def forget(self, digest: bytes, evicted: bool) -> None:
        """Forget the states after a block whose K and V are not cached any more. ``evicted`` is
        False if the contents of the block may be wrong."""
        if (slot := self.pool.find(digest)) is not None:
            self.pool.forget(slot, evicted=evicted)

    def cheapest(self) -> float:
        slot = self.pool.cheapest() if self._memory.releases_slots else None
        return NOTHING_TO_EVICT if slot is None else self.pool.worth(slot) / self._layout.slot_bytes

    def evict(self) -> None:
        self.pool.evict()

    def release_slack(self, *, runs: bool) -> None:
        self.release_idle()

    def release_idle(self) -> None:
        self._memory.release([slot.number for slot in self.pool.clean()])

    def stats(self) -> KVStats:
        dirty = [slot.number for slot in self.pool.slots if slot.dirty]
        committed = self._memory.committed_bytes(dirty)
        slots = self.pool.stats(self._layout.slot_bytes, committed)
        return KVStats(committed_bytes=committed, slots=slots)

    def add_to(self, kv_map: KVMap) -> None:
        kv_map.slots += map_slots(self.pool.slots)

    def check_invariants(self) -> None:
        holders = [slot for states in self._open.values() for slot in states.held]
        lent = [loan.memory for loan in self._loans]
        self.pool.check_invariants([*holders, *lent, *(item.slot for item in self._sealing)])
        assert SLOTS_PER_SEQUENCE * len(self._open) <= len(self.pool.slots), "too few slots"
        for slot in self.pool.slots:
            assert slot.digest is None or self._is_cached(slot.digest), f"{slot} is found nowhere"
        for states in self._open.values():
            written = [] if states.working is None else [states.working]
            for slot in (*written, *states.spare):
                assert slot.holders == 1, f"{slot} is written by several"
                assert slot.digest is None, f"{slot} is sealed and written"
