"""The cache's records of a sequence, from its opening until its buffer can be reused."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

from kvcache.block import BlockState, SparseBuffer
from kvcache.block_hashes import BlockHashes


@dataclass(slots=True)
class Progress:
    """The number of computed tokens of a sequence. The cache and the scheduler share the object."""

    computed: int = 0
    """The number of leading tokens whose K and V are valid."""
    scheduled: int = 0
    """The number of leading tokens whose K and V will be valid after all planned steps."""

    def restart_at(self, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` tokens are valid and that no step is planned."""
        self.computed = self.scheduled = num_tokens


@dataclass(slots=True, eq=False)
class CachedSequence:
    """A sequence's records in one group of layers. Its tokens, from the first to the last::

    0 .... sealed blocks .... computed .... scheduled .... mapped .... final
    never written again       | valid K/V   | written     | ahead of  | the limit
                                              by steps      need
    """

    seq_id: int
    buffer: SparseBuffer
    block_hashes: BlockHashes
    reservation: int
    """The number of blocks reserved when the sequence was opened, mapped or not."""
    final_tokens: int
    system_blocks: int
    progress: Progress
    """The sequence's progress. All groups of layers share this object."""
    mapped_tokens: int = 0
    """The number of tokens for which the buffer has mapped memory."""
    table_tokens: int = 0
    """``mapped_tokens`` plus the tokens of blocks whose mapping is queued."""
    keeps_prefix: bool = True
    """True if other sequences may share the blocks that this sequence writes."""
    has_pending_prefix: bool = False
    """True if other sequences may wait for blocks of this sequence."""
    pending_block: int | None = None
    """The index of the last block that this sequence waits for another sequence to compute."""

    @property
    def reserved_blocks(self) -> int:
        """The number of reserved blocks that are not mapped yet."""
        return max(0, self.reservation - len(self.buffer.table))

    @property
    def all_sealed(self) -> bool:
        """True if all mapped blocks are sealed, so that the next block may be shared."""
        blocks = self.buffer.table.blocks
        return not blocks or blocks[-1].state is BlockState.SEALED

    @property
    def sealed_blocks(self) -> int:
        """The number of leading sealed blocks of an open sequence, including shared blocks."""
        blocks = self.buffer.table.blocks
        return bisect_left(blocks, True, key=lambda block: block.state is not BlockState.SEALED)

    @property
    def shared_blocks(self) -> int:
        """The number of leading blocks that other sequences wrote and this sequence shares."""
        runs = takewhile(lambda run: not run.writable, self.buffer.table.runs)
        return sum(run.count for run in runs)


@dataclass(slots=True, eq=False)
class OpenSequence:
    """An open sequence: its records in all groups of layers, and its planned steps."""

    block_hashes: BlockHashes
    progress: Progress
    parts: tuple[CachedSequence, ...]
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """``(end token, epoch)`` of planned steps whose results have not been committed."""

    def schedule(self, end: int, epoch: int) -> None:
        self.progress.scheduled = end
        self.steps.append((end, epoch))

    @property
    def next_start(self) -> int:
        return self.steps[-1][0] if self.steps else self.progress.computed

    def commit(self, end: int) -> int:
        """Commit the oldest planned step, which ends at token ``end``. Return the step's epoch."""
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
    """A closed sequence. The buffer is unmapped and freed after step ``epoch`` has completed."""

    sequence: CachedSequence
    epoch: int
    ticket: int | None = None
