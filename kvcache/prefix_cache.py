"""Shares sealed blocks between sequences: from the moment a block is full until it is evicted.

A sequence takes blocks from the index in their order, from the first one on. So a sequence that has
a block mapped has the blocks before it mapped as well.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvcache.block_hashes import BlockHashes
from kvcache.heap_pool import HeapPool
from kvcache.prefix_index import MissReason, PrefixIndex
from kvcache.sequences import CachedSequence, FullBlock
from kvcache.sparse_heap import BlockRef


class Match(NamedTuple):
    """Cached blocks that a sequence can go on with."""

    blocks: list[BlockRef]
    num_cached: int
    """How many of them no sequence has now: taking these leaves fewer to evict."""


class PrefixCache:
    """Seals, shares and evicts blocks of a pool."""

    def __init__(self, pool: HeapPool, *, max_sharers: int, enabled: bool) -> None:
        """max_sharers: buffers in which one block may be mapped. enabled: whether blocks are kept
        to be found by others; a fork shares them in any case."""
        self.index = PrefixIndex()
        self._pool = pool
        self._max_sharers = max_sharers
        self._enabled = enabled
        self._full: deque[FullBlock] = deque()
        self._claims: dict[bytes, CachedSequence] = {}
        """Who is going to compute the block of that digest."""
        self.evicted_blocks = 0
        """Cached blocks that were freed since the start."""

    # --- sharing --------------------------------------------------------------------------------

    def match(self, hashes: BlockHashes, start: int) -> Match:
        """Return the sealed blocks with these hashes, from block ``start`` on."""
        blocks: list[BlockRef] = []
        num_cached = 0
        for number in range(start, hashes.shareable_blocks):
            entry = self.index.find(hashes, number)
            if entry is None or self.is_crowded(entry.block):
                break
            blocks.append(entry.block)
            num_cached += entry.idle
        return Match(blocks, num_cached)

    def is_crowded(self, block: BlockRef) -> bool:
        """Whether no further buffer may map the block."""
        return self._pool.num_buffers(block) >= self._max_sharers

    def continues(self, sequence: CachedSequence) -> bool:
        """Whether the sequence's next block could be one of the index: so far it has nothing that
        the index does not have."""
        return sequence.at_edge and self._can_be_found(sequence, len(sequence.buffer.table))

    def shared(self, sequence: CachedSequence, blocks: list[BlockRef]) -> None:
        """The sequence has mapped these sealed blocks of others, the last ones of its table."""
        first = len(sequence.buffer.table) - len(blocks)
        for number, block in enumerate(blocks, first):
            entry = self.index.at(block)
            if entry is not None:
                self.index.use(entry, system=number < sequence.system_blocks)
            self._pool.share(block)
        sequence.sealed = len(sequence.buffer.table)
        tokens = sequence.sealed * sequence.block_hashes.tokens_per_block
        sequence.computed = sequence.scheduled = tokens

    def explain(self, sequence: CachedSequence) -> tuple[int, MissReason | None]:
        """Why the sequence shares no more than it does: see PrefixIndex. Where nothing is shared
        at all, nothing is missed."""
        left_at, miss = self.index.explain(sequence.block_hashes, sequence.sealed)
        return left_at, miss if self._enabled else None

    # --- who computes what ----------------------------------------------------------------------

    def claim(self, sequence: CachedSequence) -> None:
        """The sequence computes its blocks itself; others may wait for those that will be found.
        Nobody waits for one that computes what others may have long had."""
        hashes = sequence.block_hashes
        if sequence.has_claimed or not self._enabled or hashes.max_cached_tokens is not None:
            return
        sequence.has_claimed = True
        if self._can_be_found(sequence, sequence.sealed):
            for digest in hashes.digests[sequence.sealed :]:
                self._claims[digest] = sequence

    def claimant(self, sequence: CachedSequence) -> int | None:
        """The other sequence that is going to compute this one's next blocks, if it could share
        them then. Stays the same until the last of these is sealed, so that they are mapped in one
        go."""
        hashes = sequence.block_hashes
        digests = hashes.digests
        if sequence.awaited is not None:
            owner = self._claims.get(digests[sequence.awaited])
            if owner is not None and owner is not sequence:
                return owner.seq_id
            sequence.awaited = None
        number = len(sequence.buffer.table)
        if number >= hashes.shareable_blocks or not self.continues(sequence):
            return None
        owner = self._claims.get(digests[number])
        if owner is None or owner is sequence:
            return None
        while number + 1 < hashes.shareable_blocks:
            if self._claims.get(digests[number + 1]) is not owner:
                break
            number += 1
        sequence.awaited = number
        return owner.seq_id

    def _unclaim(self, sequence: CachedSequence) -> None:
        """Nobody is to wait for the sequence any more."""
        for digest in sequence.block_hashes.digests if sequence.has_claimed else []:
            if self._claims.get(digest) is sequence:
                del self._claims[digest]

    # --- the life of a block --------------------------------------------------------------------

    def filled(self, epoch: int, sequence: CachedSequence, number: int) -> None:
        """A step of that epoch filled a block."""
        self._full.append(FullBlock(epoch, sequence, number))

    def seal(self, completed_epoch: int) -> None:
        """Blocks that were filled up to that epoch can be shared from now on."""
        while self._full and self._full[0].epoch <= completed_epoch:
            full = self._full.popleft()
            sequence = full.sequence
            if sequence.keeps_prefix:
                assert sequence.sealed == full.number
                self._pool.seal(sequence.buffer.table.blocks[full.number])
                sequence.sealed += 1
                self._publish(sequence, full.number)

    def _publish(self, sequence: CachedSequence, number: int) -> None:
        """Lets a sealed block be found, unless its past cannot be, or others use its equal: then
        nothing that follows it can be found either."""
        blocks, hashes = sequence.buffer.table.blocks, sequence.block_hashes
        if not self._enabled or not self._can_be_found(sequence, number):
            return
        entry, system = self.index.find(hashes, number), number < sequence.system_blocks
        if entry is None:
            self.index.insert(hashes, number, blocks[number], system)
        elif entry.idle:
            self._pool.free(self.index.replace(entry, blocks[number], system))
        else:
            self._unclaim(sequence)
        self._claims.pop(hashes.digests[number], None)

    def _can_be_found(self, sequence: CachedSequence, length: int) -> bool:
        """Return whether the first blocks of its table are those that the index has."""
        if length == 0:
            return True
        entry = self.index.at(sequence.buffer.table.blocks[length - 1])
        return entry is not None and entry.digest == sequence.block_hashes.digests[length - 1]

    def leave(self, sequence: CachedSequence) -> None:
        """A sequence closes; where it does not keep its prefix, nobody is to find what it wrote."""
        self._unclaim(sequence)
        blocks = sequence.buffer.table.blocks
        if not sequence.keeps_prefix and len(blocks) > sequence.borrowed:
            entry = self.index.at(blocks[sequence.borrowed])
            for block in self.index.forget(entry) if entry is not None else []:
                self._pool.free(block)
            for owner in set(self._claims.values()):
                if not self._can_be_found(owner, owner.sealed):
                    self._unclaim(owner)
        self._pool.let_go(blocks)

    def unmapped(self, blocks: Iterable[BlockRef]) -> None:
        """A closed sequence's buffer has them no more: who can be found stays."""
        self.index.tick()
        for block in blocks:
            if self._pool.unmapped(block):
                entry = self.index.at(block)
                if entry is None:
                    self._pool.free(block)
                else:
                    self.index.rest(entry)
                    self._pool.cache(block)

    def evict(self) -> bool:
        """Frees the cached block that will be missed least; False when there is none."""
        block = self.index.evict()
        if block is not None:
            self._pool.free(block)
            self.evicted_blocks += 1
        return block is not None

    def check_invariants(self, open_sequences: Iterable[CachedSequence]) -> None:
        """Raises AssertionError."""
        self.index.check_invariants()
        sequences = set(open_sequences)
        for owner in set(self._claims.values()):
            assert owner in sequences, "a sequence that left is waited for"
            assert self._can_be_found(owner, owner.sealed), "what is waited for will not be found"
