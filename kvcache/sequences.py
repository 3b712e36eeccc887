"""Records of the cache for a sequence: while it is open, and until its buffer is free."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile

from kvcache.block import BlockState, SparseBuffer
from kvcache.block_hashes import BlockHashes


@dataclass(slots=True)
class Progress:
    """The progress of a sequence. The cache and its scheduler share the one count."""

    computed: int = 0
    """Leading tokens whose K and V are valid."""
    scheduled: int = 0
    """The same after all planned steps."""

    def restart_at(self, num_tokens: int) -> None:
        """Note that the first tokens are valid, and that no step is planned."""
        self.computed = self.scheduled = num_tokens


@dataclass(slots=True, eq=False)
class CachedSequence:
    """A sequence in one group: its buffer there, and what stands behind it. Intervals of its
    tokens::

    0 .... sealed blocks .... computed .... scheduled .... mapped .... final
    never written again       | valid K/V   | written     | ahead     | the most there will be
                                              now
    """

    seq_id: int
    buffer: SparseBuffer
    block_hashes: BlockHashes
    reservation: int
    """Blocks that admission has set aside for it, mapped or not."""
    final_tokens: int
    system_blocks: int
    """Leading blocks of a system prompt."""
    progress: Progress
    """The same object in all groups."""
    mapped_tokens: int = 0
    """Tokens that its buffer has memory for."""
    table_tokens: int = 0
    """The same with pending blocks."""
    keeps_prefix: bool = True
    """Whether its own blocks may be shared."""
    has_pending_prefix: bool = False
    """Whether it was made the owner of blocks that it is going to compute."""
    pending_block: int | None = None
    """The last one of the blocks that it waits for while another sequence computes them."""

    @property
    def reserved_blocks(self) -> int:
        """Return the blocks of its reservation that are not mapped yet."""
        return max(0, self.reservation - len(self.buffer.table))

    @property
    def all_sealed(self) -> bool:
        """Return whether all of its blocks are sealed, and none is mapped ahead: another sequence
        may have the next one."""
        blocks = self.buffer.table.blocks
        return not blocks or blocks[-1].state is BlockState.SEALED

    @property
    def sealed_blocks(self) -> int:
        """Return the number of leading sealed blocks, shared ones included, of an open sequence."""
        blocks = self.buffer.table.blocks
        return bisect_left(blocks, True, key=lambda block: block.state is not BlockState.SEALED)

    @property
    def shared_blocks(self) -> int:
        """Return the number of leading blocks that other sequences wrote."""
        runs = takewhile(lambda run: not run.writable, self.buffer.table.runs)
        return sum(run.count for run in runs)


@dataclass(slots=True, eq=False)
class OpenSequence:
    """A sequence in all groups."""

    block_hashes: BlockHashes
    progress: Progress
    parts: tuple[CachedSequence, ...]
    """By the number of the group."""
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    """``(end, epoch)`` of steps that were planned and have not committed."""

    def schedule(self, end: int, epoch: int) -> None:
        """Note that a step of that epoch will compute the tokens up to ``end``."""
        self.progress.scheduled = end
        self.steps.append((end, epoch))

    @property
    def next_start(self) -> int:
        return self.steps[-1][0] if self.steps else self.progress.computed

    def commit(self, end: int) -> int:
        """Note that the oldest planned step has computed the tokens up to ``end``; return its
        epoch."""
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
    """A closed sequence whose buffer is not free yet: its epoch must pass, then it is unmapped."""

    sequence: CachedSequence
    epoch: int
    ticket: int | None = None
