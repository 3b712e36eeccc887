"""Records of the cache for a sequence, from opening until its buffer is free."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

from kvcache.block import BlockState, SparseBuffer
from kvcache.block_hashes import BlockHashes


@dataclass(slots=True)
class Progress:
    """The progress of a sequence, shared by cache and scheduler."""

    computed: int = 0
    """The number of leading tokens with valid K and V."""
    scheduled: int = 0
    """The number of leading tokens with valid K and V after all planned steps."""

    def restart_at(self, num_tokens: int) -> None:
        """Note that the first tokens are valid, and that no step is planned."""
        self.computed = self.scheduled = num_tokens


@dataclass(slots=True, eq=False)
class CachedSequence:
    """A sequence in one group. Intervals of its tokens::

    0 .... sealed blocks .... computed .... scheduled .... mapped .... final
    never written again       | valid K/V   | written     | ahead     | the limit
                                              now
    """

    seq_id: int
    buffer: SparseBuffer
    block_hashes: BlockHashes
    reservation: int
    """Blocks set aside at admission, mapped or not."""
    final_tokens: int
    system_blocks: int
    progress: Progress
    """The same object in all groups."""
    mapped_tokens: int = 0
    """Tokens that the buffer has memory for."""
    table_tokens: int = 0
    """``mapped_tokens`` plus the tokens of pending blocks."""
    keeps_prefix: bool = True
    """Whether the sequence's own blocks may be shared."""
    has_pending_prefix: bool = False
    """Whether other sequences may wait for blocks of this one."""
    pending_block: int | None = None
    """The last block that this sequence waits for while another computes it."""

    @property
    def reserved_blocks(self) -> int:
        """Blocks of the reservation that are not mapped yet."""
        return max(0, self.reservation - len(self.buffer.table))

    @property
    def all_sealed(self) -> bool:
        """Whether all blocks are sealed and none is mapped ahead: the next block may be shared."""
        blocks = self.buffer.table.blocks
        return not blocks or blocks[-1].state is BlockState.SEALED

    @property
    def sealed_blocks(self) -> int:
        """The number of leading sealed blocks of an open sequence, shared ones included."""
        blocks = self.buffer.table.blocks
        return bisect_left(blocks, True, key=lambda block: block.state is not BlockState.SEALED)

    @property
    def shared_blocks(self) -> int:
        """The number of leading blocks that other sequences wrote."""
        runs = takewhile(lambda run: not run.writable, self.buffer.table.runs)
        return sum(run.count for run in runs)


@dataclass(slots=True, eq=False)
class OpenSequence:
    """A sequence in all groups."""

    block_hashes: BlockHashes
    progress: Progress
    parts: tuple[CachedSequence, ...]
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """``(end, epoch)`` of planned steps that are not committed."""

    def schedule(self, end: int, epoch: int) -> None:
        self.progress.scheduled = end
        self.steps.append((end, epoch))

    @property
    def next_start(self) -> int:
        return self.steps[-1][0] if self.steps else self.progress.computed

    def commit(self, end: int) -> int:
        """Note that the oldest planned step, which ends at ``end``, is done; return its epoch."""
        assert self.steps, "committed tokens were never scheduled"
        scheduled, epoch = self.steps.popleft()
        assert end == scheduled, "committed tokens were never scheduled"
        self.progress.computed = end
        return epoch

    def cancel_steps(self) -> None:
        self.progress.restart_at(self.progress.computed)
        self.steps.clear()


@dataclass(slots=True)
class ClosedSequence:
    """A closed sequence whose buffer is not free yet: it is unmapped after the epoch."""

    sequence: CachedSequence
    epoch: int
    ticket: int | None = None
