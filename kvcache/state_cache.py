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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcache.block import Block, Retention, Slot
from kvcache.block_hashes import BlockHashes
from kvcache.prefix_index import MissReason, PrefixIndex
from kvcache.sequences import CachedSequence
from kvcache.slot_pool import SlotPool, StateSegment

# The most slots of one sequence: one for the last block boundary, one for the next, one working.
SLOTS_PER_SEQUENCE = 3
# In long prompts, the states are kept at each multiple of this number of tokens.
WAYPOINT_TOKENS = 4096
# The states after this many newest turns of a conversation are kept longer than waypoints.
ENDS_PER_CONVERSATION = 2
# The number of slots that a conversation keeps longer than waypoints: after the newest turns, the
# system prompt and the newest user message.
SLOTS_PER_CONVERSATION = 2 + ENDS_PER_CONVERSATION


class PromptBoundaries(NamedTuple):
    """Positions in a prompt, in tokens, after which other prompts may differ. 0 means unknown."""

    user_end: int = 0
    """The end of the newest user message. Later prompts may drop the reasoning after it."""
    messages_end: int = 0
    """The end of the last message, before the tokens that make the model answer."""


NO_BOUNDARIES = PromptBoundaries()


def planned_checkpoints(
    hashes: BlockHashes, system_tokens: int, boundaries: PromptBoundaries
) -> dict[int, Retention]:
    """Return block boundaries, as numbers of leading blocks, with the reasons for keeping states
    there. Each is the last boundary before the end of the prompt, of the system prompt, or of a
    part that ``boundaries`` names."""
    positions = (
        (hashes.num_tokens - 1, Retention.WAYPOINT),
        (boundaries.messages_end, Retention.END),
        (boundaries.user_end, Retention.USER),
        (system_tokens, Retention.SYSTEM),
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


class StateCache:
    """The state slots of all sequences. Only the engine thread may call methods."""

    def __init__(self, pool: SlotPool, index: PrefixIndex, tokens_per_block: int) -> None:
        self.pool = pool
        self._index = index
        self._size = tokens_per_block
        self._waypoint_blocks = max(1, WAYPOINT_TOKENS // tokens_per_block)
        index.slots = pool
        self._open: dict[int, SequenceStates] = {}
        self._sealing: deque[_Sealing] = deque()

    @property
    def recovering(self) -> bool:
        return bool(self._sealing) or self.pool.recovering

    @property
    def has_room(self) -> bool:
        return SLOTS_PER_SEQUENCE * (len(self._open) + 1) <= len(self.pool.slots)

    @staticmethod
    def last_with_state(blocks: Sequence[Block]) -> int:
        """Return the largest number of leading blocks after which states are kept, or 0."""
        for number in range(len(blocks), 0, -1):
            prefix = blocks[number - 1].prefix
            if prefix is not None and prefix.slot is not None:
                return number
        return 0

    def explain(self, sequence: CachedSequence) -> MissReason | None:
        """Return the reason if missing states keep a sequence from sharing blocks, else None."""
        hashes, reason = sequence.block_hashes, None
        for number in range(sequence.sealed_blocks, hashes.shareable_blocks):
            block = self._index.find(hashes, number)
            if block is None:
                break
            if block.found_by.slot is not None:
                return None
            if hashes.digests[number] in self.pool.evicted:
                reason = MissReason.STATE_EVICTED
            reason = reason or MissReason.NO_STATE
        return reason

    def open(
        self, seq_id: int, sequence: CachedSequence, checkpoints: dict[int, Retention], cached: int
    ) -> None:
        """Begin with the states after the shared blocks. ``checkpoints`` comes from
        planned_checkpoints. ``cached`` is the number of leading blocks with cached K and V. If no
        states are cached after these blocks, the sequence keeps them for later prompts."""
        if cached > len(sequence.buffer.table):
            checkpoints = {cached: Retention.END} | checkpoints
        self._open[seq_id] = SequenceStates(sequence, checkpoints)
        self.go_on(seq_id)

    def checkpoints(self, seq_id: int) -> dict[int, Retention]:
        return self._open[seq_id].checkpoints

    def go_on(self, seq_id: int) -> None:
        """Continue from the cached states after the last block that the sequence shares."""
        states = self._open[seq_id]
        blocks = states.sequence.buffer.table.blocks
        if len(blocks) == states.base_block:
            return
        assert not states.steps, "a step would go on from another state"
        slot = blocks[-1].found_by.slot
        assert slot is not None, "no state is cached here"
        self.pool.hold(slot)
        self._drop_working(states)
        if states.base is not None:
            self.pool.let_go(states.base)
        states.base = states.head = slot
        states.base_block = states.kept_block = len(blocks)
        if slot.retention is Retention.USER:
            self.pool.leave(slot)
        slot.retention = max(slot.retention, states.checkpoints.get(len(blocks), slot.retention))
        self.pool.use(self._chain(states.sequence.block_hashes, len(blocks)))

    # --- running steps ----------------------------------------------------------------------------

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Reserve slots for a step up to token ``num_tokens``. Return False if slots run out, or if
        the results of the step in flight must be read first."""
        states = self._open[seq_id]
        start = states.sequence.progress.scheduled
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

    def schedule(self, plan: Iterable[tuple[int, int, int]], epoch: int) -> list[StateSegment]:
        """Return the slots of a step's sequences. ``plan`` has ``(seq_id, start, count)`` of
        each."""
        return [self._schedule(seq_id, start, count, epoch) for seq_id, start, count in plan]

    def _schedule(self, seq_id: int, start: int, count: int, epoch: int) -> StateSegment:
        states, end = self._open[seq_id], start + count
        read = states.head
        assert (read is None) == (start == 0), "a state is missing"
        crossed = self._cross(states, start, end)
        writes = [(block * self._size - start, slot) for block, slot in crossed]
        if end % self._size:
            if states.working is None:
                states.working = states.spare.pop()
            writes.append((count, states.working))
        states.head = writes[-1][1]
        states.steps.append(crossed)
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
        return held + len(self._sealing) < len(self.pool.slots)

    def commit(self, seq_id: int, epoch: int) -> None:
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
        self.pool.hold(states.base)
        sealing = _Sealing(epoch, states.base, states.sequence, states.base_block, retention)
        self._sealing.append(sealing)

    # --- dropping steps and closing sequences -----------------------------------------------------

    def cancel_steps(self, seq_id: int) -> int:
        """Drop all planned steps and return to the base. Return the base's position in tokens."""
        states = self._open[seq_id]
        for step in states.steps:
            for _, slot in step:
                self.pool.let_go(slot)
        states.steps.clear()
        self._drop_working(states)
        states.head = states.base
        return states.base_block * self._size

    def close(self, seq_id: int, epoch: int) -> None:
        """Queue the sequence's base slot for sealing, and stop using its other slots."""
        states = self._open[seq_id]
        self.cancel_steps(seq_id)
        for slot in states.spare:
            self.pool.let_go(slot)
        if states.base is not None:
            if states.base.prefix is None:
                self._seal_later(states, Retention.END, epoch)
            elif states.sequence.keeps_prefix:
                states.base.retention = max(states.base.retention, Retention.END)
            self.pool.let_go(states.base)
        del self._open[seq_id]

    def _drop_working(self, states: SequenceStates) -> None:
        if states.working is not None:
            self.pool.let_go(states.working)
            states.working = None

    def advance(self, completed_epoch: int) -> None:
        """Seal the slots of completed steps. The blocks before these slots are sealed already."""
        while self._sealing and self._sealing[0].epoch <= completed_epoch:
            item = self._sealing.popleft()
            self._seal(item)
            self.pool.let_go(item.slot)
        self.pool.advance(completed_epoch)

    def _seal(self, item: _Sealing) -> None:
        """Seal a slot if its block is in the index and has no slot yet."""
        hashes = item.sequence.block_hashes
        block = self._index.find(hashes, item.block - 1)
        if not item.sequence.keeps_prefix or block is None:
            return
        prefix = block.found_by
        if prefix.slot is not None:
            prefix.slot.retention = max(prefix.slot.retention, item.retention)
            return
        self.pool.seal(item.slot, prefix, item.retention, item.block * self._size)
        chain = self._chain(hashes, item.block)
        self.pool.use(chain)
        before = [
            slot.conversation for slot in chain[:-1] if slot.retention is not Retention.SYSTEM
        ]
        item.slot.conversation = before[-1] if before else item.sequence.seq_id
        for kind, limit in ((Retention.END, ENDS_PER_CONVERSATION), (Retention.USER, 1)):
            for older in [slot for slot in chain if slot.retention is kind][:-limit]:
                older.retention = Retention.WAYPOINT

    def _chain(self, hashes: BlockHashes, blocks: int) -> list[Slot]:
        """Return the slots after a sequence's first ``blocks`` blocks, in order."""
        chain = []
        for number in range(blocks):
            block = self._index.find(hashes, number)
            assert block is not None, "a block is found, and one before it is not"
            if block.found_by.slot is not None:
                chain.append(block.found_by.slot)
        return chain

    def check_invariants(self) -> None:
        holders = [slot for states in self._open.values() for slot in states.held]
        self.pool.check_invariants([*holders, *(item.slot for item in self._sealing)])
        assert SLOTS_PER_SEQUENCE * len(self._open) <= len(self.pool.slots), "too few slots"
        for slot in self.pool.slots:
            assert slot.prefix is None or self._index.has(slot.prefix), f"{slot} is found nowhere"
        for states in self._open.values():
            written = [] if states.working is None else [states.working]
            for slot in (*written, *states.spare):
                assert slot.holders == 1, f"{slot} is written by several"
                assert slot.prefix is None, f"{slot} is sealed and written"
