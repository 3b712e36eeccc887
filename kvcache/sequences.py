"""The cache's records of open sequences: what all groups of layers share, and one group's part."""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from kvcache.block_hashes import BlockHashes
from kvcache.records import Block, BlockState, PageTable, SparseBuffer
from kvcache.stats import MissReason


class PromptBoundaries(NamedTuple):
    """Positions in a prompt, in tokens, after which other prompts may differ. 0 means unknown."""

    system_end: int = 0
    """The end of the tools and system messages. Other conversations may share what is before."""
    user_end: int = 0
    """The end of the newest user message. Later prompts may drop the reasoning after it."""
    messages_end: int = 0
    """The end of the last message, before the tokens that make the model answer."""


NO_BOUNDARIES = PromptBoundaries()


@dataclass(slots=True)
class Progress:
    """The number of computed tokens of a sequence. The cache and the scheduler share the object."""

    computed: int = 0
    """The number of leading tokens whose K and V are valid."""
    settled: int = 0
    """The number of these after which no group has to compute a block again."""
    scheduled: int = 0
    """The number of leading tokens whose K and V will be valid after all planned steps."""

    def restart_at(self, num_tokens: int) -> None:
        """Note that the first ``num_tokens`` tokens are valid and that no step is planned."""
        self.computed = self.settled = self.scheduled = num_tokens


@dataclass(slots=True, eq=False)
class CachedSequence:
    """An open sequence and its planned steps. All groups of layers share this record."""

    seq_id: int
    block_hashes: BlockHashes
    reserved_tokens: int
    """The number of tokens for which memory is reserved, from the opening on."""
    final_tokens: int
    """The most tokens that the sequence may reach."""
    boundaries: PromptBoundaries
    progress: Progress = field(default_factory=Progress)
    disk_miss: MissReason | None = None
    """The reason that records in files were not used, or None."""
    keeps_prefix: bool = True
    """True if other sequences may share what this sequence writes."""
    first_own: int | None = None
    """The number of the first block that this sequence computed itself, or None."""
    pending_block: int | None = None
    """The index of the last block that this sequence waits for another sequence to compute."""
    steps: deque[tuple[int, int, int]] = field(default_factory=deque)
    """``(end token, drafts, epoch)`` of planned steps whose results have not been committed."""

    @property
    def system_blocks(self) -> int:
        return self.boundaries.system_end // self.block_hashes.tokens_per_block

    def schedule(self, end: int, drafts: int, epoch: int) -> None:
        assert not (self.steps and self.steps[-1][1]), "a step follows drafts that may be rejected"
        self.progress.scheduled = end
        self.steps.append((end, drafts, epoch))

    @property
    def next_start(self) -> int:
        return self.steps[-1][0] if self.steps else self.progress.computed

    def commit(self, end: int) -> int:
        """Commit the oldest planned step up to token ``end``: all of it, or without its last
        drafts. Return the step's epoch."""
        assert self.steps, "committed tokens were never scheduled"
        scheduled, drafts, epoch = self.steps.popleft()
        assert scheduled - drafts <= end <= scheduled, "committed tokens were never scheduled"
        if drafts:
            self.progress.scheduled = end
        if self.first_own is None:
            self.first_own = self.progress.computed // self.block_hashes.tokens_per_block
        self.progress.computed = end
        return epoch


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """The blocks of a sequence in one group of layers. Its tokens, from the first to the last::

    0 .... sealed blocks .... computed .... scheduled .... mapped .... final
    never written again       | valid K/V   | written     | ahead of  | the limit
                                              by steps      need
    """

    sequence: CachedSequence
    buffer: SparseBuffer

    @property
    def table(self) -> PageTable:
        return self.buffer.table

    @property
    def blocks(self) -> list[Block]:
        """The blocks from the first one on that the sequence needs."""
        return self.buffer.table.blocks

    @property
    def all_sealed(self) -> bool:
        """True if all mapped blocks are sealed, so that the next block may be shared."""
        return not self.blocks or self.blocks[-1].state is BlockState.SEALED

    @property
    def sealed_blocks(self) -> int:
        """The number of leading sealed blocks of an open sequence, including shared blocks."""
        sealed = bisect_left(
            self.blocks, True, key=lambda block: block.state is not BlockState.SEALED
        )
        return self.table.first + sealed

    @property
    def shared_blocks(self) -> int:
        """The number of leading blocks in the table that other sequences wrote."""
        runs = takewhile(lambda run: not run.writable, self.table.runs)
        return sum(run.count for run in runs)


@dataclass(slots=True)
class ClosedSequence:
    """A closed sequence. The buffer is unmapped and freed after step ``epoch`` has completed."""

    blocks: SequenceBlocks
    epoch: int
    ticket: int | None = None
    pinned: list[Block] = field(default_factory=list)
    """Blocks of other buffers that are kept as long."""
