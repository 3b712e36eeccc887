"""The hidden states that a model's head for drafts needs of the tokens before a step.

The head's key and value of a token depend on the hidden state of the token before. So each sequence
keeps the hidden state before its next token, and those at positions to which it may be sent back,
or from which other answers to its prompt go on. The hidden state at the end of a block is also kept
by the block's hash, as long as other sequences may begin there::

    block | block | block ......... computed
          ^       ^       ^         ^
          kept by the hash          kept until the next step
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from kvcache.block_hashes import BlockHashes
from kvcache.evictor import NOTHING_TO_EVICT
from kvcache.groups.base import KVGroup, Loan, StepPlan
from kvcache.hidden import HiddenRecord, HiddenRow, HiddenRows, HiddenStates
from kvcache.inspector import KVMap
from kvcache.sequences import CachedSequence
from kvcache.stats import KVStats, MissReason
from kvcache.views import KVViews


@dataclass(slots=True)
class SequenceHidden:
    """The hidden states of one open sequence, by position: the number of tokens before it."""

    sequence: CachedSequence
    forked_at: tuple[int, int]
    """The positions from which later answers to the same prompt go on."""
    kept: dict[int, HiddenRow] = field(default_factory=dict)
    newest: dict[int, HiddenRow] = field(default_factory=dict)
    """Those of the newest step, from which the next one may go on."""

    def find(self, position: int) -> HiddenRow | None:
        return self.newest.get(position) or self.kept.get(position)


# How many more hidden states are kept than sequences can begin at, before the others are dropped.
MOST_STALE = 64


class _Sealing(NamedTuple):
    """A hidden state to keep by its hash when the step that computed it has completed."""

    epoch: int
    sequence: CachedSequence
    block: int
    row: HiddenRow


class HiddenGroup(KVGroup):
    """The hidden states after the model's last layer."""

    def __init__(
        self, tokens_per_block: int, hidden_size: int, can_begin: Callable[[bytes], bool]
    ) -> None:
        """``can_begin`` returns True if a sequence may begin after the block with this hash."""
        self._size = tokens_per_block
        self._hidden_size = hidden_size
        self._can_begin = can_begin
        self._cached: dict[bytes, HiddenRow] = {}
        self._most_cached = MOST_STALE
        self._open: dict[int, SequenceHidden] = {}
        self._sealing: deque[_Sealing] = deque()

    # --- opening sequences ------------------------------------------------------------------------

    def has_room(self, hashes: BlockHashes, num_tokens: int) -> bool:
        return True

    def open(self, sequence: CachedSequence, position: int, wanted: int, *, alone: bool) -> bool:
        last = sequence.block_hashes.num_tokens - 1
        places = last // self._size * self._size, last
        self._open[sequence.seq_id] = SequenceHidden(sequence, places)
        return self.attach(sequence.seq_id, position)

    def attach(self, seq_id: int, position: int, parent_id: int | None = None) -> bool:
        own, start = self._open[seq_id], position * self._size
        if position and start not in own.kept:
            row = None if parent_id is None else self._open[parent_id].find(start)
            digest = own.sequence.block_hashes.digests[position - 1]
            own.kept[start] = row or self._cached[digest]
        return True

    def can_fork(self, seq_id: int, child_id: int, position: int) -> bool:
        last = self._open[child_id].sequence.block_hashes.num_tokens - 1
        needed = {position * self._size, last} - {0}
        return all(self._open[seq_id].find(each) for each in needed)

    def copy_block(self, seq_id: int, child_id: int, block: int, tokens: int) -> None:
        position = block * self._size + tokens
        row = self._open[seq_id].find(position)
        assert row is not None, "can_fork was not called"
        self._open[child_id].kept[position] = row

    def positions_to_share(self, seq_id: int) -> Collection[int]:
        return range(1, len(self._open[seq_id].sequence.block_hashes.digests) + 1)

    def explain(self, seq_id: int, cached_tokens: int) -> tuple[int, MissReason | None]:
        return cached_tokens, None  # they are cached where K and V are

    # --- steps ------------------------------------------------------------------------------------

    def reserve(self, seq_id: int, num_tokens: int, drafts: int = 0) -> bool:
        return True

    def schedule(self, plan: StepPlan, epoch: int, views: KVViews) -> None:
        before = [self._before(seq_id, start) for seq_id, start, _, _ in plan]
        kept, newest = HiddenRows(), HiddenRows()
        for (seq_id, start, count, drafts), last in zip(
            plan, accumulate(each.count for each in plan), strict=True
        ):
            own, end, size = self._open[seq_id], start + count, self._size
            first = last - end  # of a token at position 0, among the step's rows
            boundaries = range((start // size + 1) * size, end + 1, size)
            for position in {*boundaries, *(p for p in own.forked_at if start < p <= end)}:
                own.kept[position] = kept.add(first + position - 1)
            own.newest = {p: newest.add(first + p - 1) for p in range(end - drafts, end + 1)}
        views.hidden = HiddenStates(before, [each.count for each in plan], (kept, newest))

    def _before(self, seq_id: int, position: int) -> HiddenRow | None:
        row = self._open[seq_id].find(position)
        assert row is not None or not position, f"{seq_id}: no hidden state before {position}"
        return row

    def preview(self, plan: StepPlan, views: KVViews) -> None:
        before = [self._open[seq_id].find(start) for seq_id, start, _, _ in plan]
        views.hidden = HiddenStates(before, [each.count for each in plan])

    def commit(self, seq_id: int, start: int, end: int, epoch: int) -> None:
        own, last = self._open[seq_id], end // self._size
        self._seal_later(own, range(start // self._size + 1, last + 1), epoch)
        for position in [p for p in own.kept if p < last * self._size and p not in own.forked_at]:
            del own.kept[position]

    def _seal_later(self, own: SequenceHidden, blocks: Iterable[int], epoch: int) -> None:
        for block in blocks:
            if (row := own.kept.get(block * self._size)) is not None:
                self._sealing.append(_Sealing(epoch, own.sequence, block, row))

    def cancel_steps(self, seq_id: int) -> int:
        own = self._open[seq_id]
        settled = own.sequence.progress.settled
        own.newest = {}
        own.kept = {position: row for position, row in own.kept.items() if position <= settled}
        return max(own.kept, default=0)

    def close(self, seq_id: int, epoch: int) -> None:
        own = self._open.pop(seq_id)
        # A sequence may end where no other could begin before it ended.
        self._seal_later(own, [own.sequence.progress.settled // self._size], epoch)

    def step_completed(self, epoch: int, *, is_quiet: bool) -> None:
        """Keep the hidden states of the blocks after which sequences can begin now."""
        while self._sealing and self._sealing[0].epoch <= epoch:
            item = self._sealing.popleft()
            digest = item.sequence.block_hashes.digests[item.block - 1]
            if item.sequence.keeps_prefix and self._can_begin(digest):
                self._cached[digest] = item.row
        if len(self._cached) > self._most_cached:
            cached = self._cached.items()
            self._cached = {digest: row for digest, row in cached if self._can_begin(digest)}
            self._most_cached = len(self._cached) + MOST_STALE

    # --- records in files -------------------------------------------------------------------------

    def has(self, hashes: BlockHashes, number: int) -> bool:
        digest = hashes.digests[number]
        return digest in self._cached and self._can_begin(digest)

    def lend(self, sequence: CachedSequence, numbers: Sequence[int]) -> Loan | None:
        row = self._cached.get(sequence.block_hashes.digests[numbers[0]])
        return None if row is None else self._loan(sequence, numbers, HiddenRecord.of(row))

    def lend_empty(self, sequence: CachedSequence, numbers: range) -> Loan | None:
        return self._loan(sequence, numbers, HiddenRecord.empty(self._hidden_size))

    def _loan(self, sequence: CachedSequence, numbers: Sequence[int], record: HiddenRecord) -> Loan:
        assert len(numbers) == 1, "a loan has one hidden state"
        size = len(record.data)
        return Loan(
            sequence,
            numbers,
            size,
            lambda _, fd: record.write(fd),
            lambda _, fd: record.read(fd),
            record,
        )

    def adopt(self, loan: Loan, numbers: Collection[int]) -> None:
        for number in numbers:
            digest = loan.sequence.block_hashes.digests[number]
            if self._can_begin(digest):
                self._cached[digest] = loan.memory.row()
                loan.adopted.add(number)
        self._most_cached = max(self._most_cached, len(self._cached))

    def end_loan(self, loan: Loan) -> None: ...

    # --- memory -----------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        return False

    def cheapest(self) -> float:
        return NOTHING_TO_EVICT  # they go when nothing begins there

    def evict(self) -> None: ...

    def release_slack(self, *, runs: bool) -> None: ...

    def release_idle(self) -> None: ...

    def stats(self) -> KVStats:
        return KVStats()

    def add_to(self, kv_map: KVMap) -> None: ...

    def check_invariants(self) -> None:
        for own in self._open.values():
            sealed = own.sequence.progress.settled // self._size * self._size
            assert not sealed or own.find(sealed), f"no hidden state before {sealed}"
        assert len(self._cached) <= self._most_cached
