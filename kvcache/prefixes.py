"""Shares sealed (full, read-only) blocks between sequences until the blocks are evicted.

A sequence maps blocks in order, from the first on that it needs, and so shares all of these before
a shared one. If another sequence is going to compute blocks that it needs, it can wait for them."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from heapq import heapify, heappop, heappush

from kvcache.block_hashes import TOKEN_BYTES, BlockHashes
from kvcache.evictor import Evictions, UseClock
from kvcache.pool import HeapPool
from kvcache.records import Block, BlockState, Prefix
from kvcache.sequences import CachedSequence, SequenceBlocks
from kvcache.stats import MissReason


class PendingPrefixes:
    """The sequences that are going to compute blocks, by the hashes of the blocks."""

    def __init__(self) -> None:
        self._owners: dict[bytes, CachedSequence] = {}
        self._digests: dict[CachedSequence, list[bytes]] = {}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __contains__(self, sequence: CachedSequence) -> bool:
        return sequence in self._digests

    def __iter__(self) -> Iterator[CachedSequence]:
        """The sequences that others may wait for."""
        return iter(set(self._owners.values()))

    def add(self, sequence: CachedSequence, positions: Iterable[int]) -> None:
        """Let others wait until ``sequence`` has computed its first ``position`` blocks, for any of
        ``positions``."""
        assert sequence not in self._digests, f"{sequence.seq_id} is waited for already"
        digests = [sequence.block_hashes.digests[position - 1] for position in positions]
        self._digests[sequence] = digests
        self._owners |= dict.fromkeys(digests, sequence)

    def remove(self, digest: bytes) -> None:
        """Note that a block can be shared now."""
        self._owners.pop(digest, None)

    def withdraw(self, sequence: CachedSequence) -> None:
        """Remove all blocks of a sequence, which then no other sequence waits for."""
        for digest in self._digests.pop(sequence, ()):
            if self._owners.get(digest) is sequence:
                del self._owners[digest]

    def awaited(self, sequence: CachedSequence) -> CachedSequence | None:
        """Return the sequence that ``sequence`` waits for already, or None. The result stays the
        same until all awaited blocks are sealed, so that they are mapped together."""
        if sequence.pending_block is None:
            return None
        owner = self._owner(sequence.block_hashes, sequence.pending_block, sequence)
        if owner is None:
            sequence.pending_block = None
        return owner

    def find(self, sequence: CachedSequence, start: int) -> CachedSequence | None:
        """Return another sequence that is going to compute blocks which ``sequence`` can share from
        block ``start`` on, or None."""
        hashes = sequence.block_hashes
        # Search from the end for the last block with an owner. Blocks before it may have none.
        for number in reversed(range(start, hashes.shareable_blocks)):
            owner = self._owner(hashes, number, sequence)
            if owner is not None:
                sequence.pending_block = number
                return owner
        return None

    def _owner(
        self, hashes: BlockHashes, number: int, waiting: CachedSequence
    ) -> CachedSequence | None:
        owner = self._owners.get(hashes.digests[number])
        return None if owner is waiting else owner


# An eviction queue is rebuilt if over half of its entries, and at least this many, are outdated.
STALE_QUEUE_ENTRIES = 64


class BlockIndex:
    """The index of sealed blocks, by the hash of all tokens up to the block's end.

    The least recently used block is evicted first. Blocks that are spared are evicted after all
    others."""

    def __init__(self, clock: UseClock) -> None:
        self._clock = clock
        self._blocks: dict[bytes, Block] = {}
        self._evicted = Evictions()
        self._queues: dict[bool, list[tuple[int, bytes]]] = {False: [], True: []}
        """``(last use, hash)`` of cached blocks that may be evicted, some outdated. Spared blocks
        are under the key True."""
        self._cached = {False: 0, True: 0}
        """The number of cached blocks that are spared (True) and of others (False)."""
        self.on_removal: Callable[[bytes, bool], None] = lambda digest, evicted: None
        """Called with the hash of each removed block. ``evicted`` is False if the block's contents
        may be wrong."""

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, hashes: BlockHashes, number: int) -> Block | None:
        block = self._blocks.get(hashes.digests[number])
        if block is None or block.found_by.tokens != hashes.tokens[number]:
            return None
        return block

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def insert(self, hashes: BlockHashes, number: int, block: Block, spared: bool) -> None:
        """Add a sealed block that is in use."""
        digest, parent = hashes.digests[number], hashes.parent(number)
        assert digest not in self._blocks
        before = self._blocks[parent].prefix if parent in self._blocks else None
        block.prefix = Prefix(digest, parent, before, hashes.tokens[number], number, spared)
        self._blocks[digest] = block
        self._evicted.discard(digest)

    def can_insert(self, hashes: BlockHashes, number: int) -> bool:
        """Return True if no equal block is in the index, and prompts would find this one there."""
        return hashes.digests[number] not in self._blocks

    def replace(self, cached: Block, block: Block, spared: bool) -> None:
        """Replace an equal cached block by ``block``, which is in use. ``cached`` can be freed."""
        assert cached.state is BlockState.CACHED
        self.use(cached, spared)
        block.prefix, cached.prefix = cached.found_by, None
        self._blocks[block.prefix.digest] = block

    def use(self, block: Block, spared: bool = False) -> None:
        """Note that a buffer will map the block, which is spared from then on if ``spared``."""
        prefix = block.found_by
        if block.state is BlockState.CACHED:
            self._cached[prefix.spared] -= 1
        prefix.spared = prefix.spared or spared

    def set_spared(self, block: Block, spared: bool) -> None:
        """Note whether a block that is in use is spared once it is cached."""
        assert block.state is not BlockState.CACHED
        block.found_by.spared = spared

    def note_cached(self, block: Block) -> None:
        """Note that no buffer maps the block any more, so that it may be evicted."""
        assert block.state is BlockState.CACHED
        prefix = block.found_by
        prefix.last_use = self._clock.now
        self._cached[prefix.spared] += 1
        self._queue_for_eviction(block)

    def cheapest(self) -> Block | None:
        """Return the cached block to evict next, or None if no block is cached."""
        for spared in (False, True) if self._spares else (True, False):
            queue = self._queues[spared]
            while queue and not self._is_current(spared, *queue[0]):
                heappop(queue)
            if queue:
                return self._blocks[queue[0][1]]
        return None

    @property
    def _spares(self) -> bool:
        return True

    def evict(self) -> Block | None:
        """Remove and return the cheapest cached block, or return None if no block is cached."""
        block = self.cheapest()
        if block is not None:
            self._evicted.add(block.found_by.digest)
            self._remove(block, evicted=True)
        return block

    def invalidate(self, hashes: BlockHashes, number: int) -> list[Block]:
        """Remove the block with this number, whose contents are doubtful, and all that continue
        its prefix: nothing else can have been computed from it. Return the cached ones."""
        following = self._following(hashes, number)
        for gone in reversed(following):
            self._remove(gone, evicted=False)
        return [gone for gone in following if gone.state is BlockState.CACHED]

    def _following(self, hashes: BlockHashes, number: int) -> list[Block]:
        """Return the block with this number and all that continue its prefix, or may: of a window,
        only the newest blocks are read from files, and what came before them is not known here.
        That block, and others between, may have been evicted."""
        follows = dict.fromkeys(hashes.digests[number : number + 1], True)
        for block in self._blocks.values():
            path, prefix, first = list[bytes](), block.prefix, 0
            while prefix is not None and prefix.digest not in follows:
                path.append(prefix.digest)
                first, prefix = prefix.number, prefix.before
            may_follow = first > number if prefix is None else follows[prefix.digest]
            follows |= dict.fromkeys(path, may_follow)
        return [block for digest, block in self._blocks.items() if follows[digest]]

    def explain(self, hashes: BlockHashes, matched: int) -> tuple[int, MissReason | None]:
        """Return two things: the number of tokens of a prompt's first ``matched`` blocks, which it
        shares, and the reason that it shares no more, which is known."""
        missing = hashes.digests[matched : hashes.shareable_blocks]
        evicted = any(digest in self._evicted for digest in missing)
        reason = MissReason.WINDOW_EVICTED if evicted else MissReason.NO_WINDOW
        return matched * hashes.tokens_per_block, reason

    def _is_current(self, spared: bool, last_use: int, digest: bytes) -> bool:
        block = self._blocks.get(digest)
        if block is None or not self._may_evict(digest):
            return False
        prefix = block.found_by
        unused = block.state is BlockState.CACHED
        return unused and prefix.spared == spared and prefix.last_use == last_use

    def _may_evict(self, digest: bytes) -> bool:
        return True

    def _queue_for_eviction(self, block: Block) -> None:
        prefix = block.found_by
        if block.state is not BlockState.CACHED or not self._may_evict(prefix.digest):
            return
        queue = self._queues[prefix.spared]
        heappush(queue, (prefix.last_use, prefix.digest))
        if len(queue) > 2 * self._cached[prefix.spared] + STALE_QUEUE_ENTRIES:
            queue[:] = {item for item in queue if self._is_current(prefix.spared, *item)}
            heapify(queue)

    def _remove(self, block: Block, *, evicted: bool) -> None:
        prefix, block.prefix = block.found_by, None
        self.on_removal(prefix.digest, evicted)
        del self._blocks[prefix.digest]
        if block.state is BlockState.CACHED:
            self._cached[prefix.spared] -= 1

    def check_invariants(self) -> None:
        queued = {(kind, *item) for kind in (False, True) for item in self._queues[kind]}
        counted = Counter[bool]()
        for digest, block in self._blocks.items():
            prefix, cached = block.found_by, block.state is BlockState.CACHED
            assert prefix.digest == digest
            evictable = cached and self._may_evict(digest)
            assert not evictable or (prefix.spared, prefix.last_use, digest) in queued
            counted[prefix.spared] += cached
        assert all(counted[spared] == count for spared, count in self._cached.items())


class PrefixIndex(BlockIndex):
    """An index in which a block is only useful together with all blocks before it.

    A block's children are the blocks that continue its prefix. A cached block has only cached
    children. Only blocks without children are evicted. Blocks of system prompts are spared while
    they are at most half of the cached blocks."""

    def __init__(self, clock: UseClock) -> None:
        super().__init__(clock)
        self._children: dict[bytes, list[bytes]] = {}
        """The token ids of each block's children, sorted, by the hash of the parent block."""

    def insert(self, hashes: BlockHashes, number: int, block: Block, spared: bool) -> None:
        super().insert(hashes, number, block, spared)
        insort(self._children.setdefault(hashes.parent(number), []), hashes.tokens[number])

    def can_insert(self, hashes: BlockHashes, number: int) -> bool:
        follows = not number or hashes.parent(number) in self._blocks
        return follows and super().can_insert(hashes, number)

    @property
    def _spares(self) -> bool:
        return self._cached[True] <= self._cached[False]

    def _following(self, hashes: BlockHashes, number: int) -> list[Block]:
        digests = hashes.digests[number : number + 1]
        following = [self._blocks[digest] for digest in digests if digest in self._blocks]
        for parent in following:
            digest = parent.found_by.digest
            for tokens in self._children.get(digest, ()):
                following.append(self._blocks[sha256(digest + tokens).digest()])
        return following

    def explain(self, hashes: BlockHashes, matched: int) -> tuple[int, MissReason | None]:
        """Return two things: the number of a prompt's leading cached tokens, and the reason that no
        more can be shared. The reason is None if all that may be shared is cached. At least
        ``matched`` blocks are cached. Blocks with another salt are ignored."""
        size = hashes.tokens_per_block
        while matched < hashes.shareable_blocks and self.find(hashes, matched) is not None:
            matched += 1
        full = matched < len(hashes.digests)
        siblings = self._children.get(hashes.parent(matched), [])
        left_at = matched * size + _common(
            siblings, hashes.tokens[matched] if full else hashes.tail
        )
        if matched >= hashes.shareable_blocks:
            return left_at, None
        if hashes.digests[matched] in self._evicted:
            return left_at, MissReason.EVICTED
        return left_at, MissReason.NEVER_CACHED

    def _may_evict(self, digest: bytes) -> bool:
        return digest not in self._children

    def _remove(self, block: Block, *, evicted: bool) -> None:
        prefix = block.found_by
        assert prefix.digest not in self._children
        super()._remove(block, evicted=evicted)
        siblings = self._children[prefix.parent]
        del siblings[bisect_left(siblings, prefix.tokens)]
        if not siblings:
            del self._children[prefix.parent]
            if (parent := self._blocks.get(prefix.parent)) is not None:
                self._queue_for_eviction(parent)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert sum(map(len, self._children.values())) == len(self._blocks)
        for block in self._blocks.values():
            parent = self._blocks.get(block.found_by.parent)
            assert not block.found_by.number or parent is not None, "a gap before a block"
            cached = block.state is BlockState.CACHED
            orphan = parent is not None and parent.state is BlockState.CACHED and not cached
            assert not orphan, "a child in use, a cached parent"


def _common(sorted_ids: list[bytes], ids: bytes) -> int:
    """Return the greatest number of leading tokens that ``ids`` shares with any of ``sorted_ids``.
    Only the two neighbours of ``ids`` in the sort order need to be compared."""
    place = bisect_left(sorted_ids, ids)
    return max(
        (_common_tokens(other, ids) for other in sorted_ids[max(0, place - 1) : place + 1]),
        default=0,
    )


def _common_tokens(one: bytes, other: bytes) -> int:
    shorter = min(len(one), len(other))
    different = (i for i in range(shorter) if one[i] != other[i])
    return next(different, shorter) // TOKEN_BYTES


class PrefixCache:
    """Seals full blocks of one HeapPool, lets other sequences find the blocks, and evicts them."""

    def __init__(
        self,
        index: BlockIndex,
        pool: HeapPool,
        pending: PendingPrefixes,
        clock: UseClock,
        *,
        max_sharers: int,
        enabled: bool,
        spares: Callable[[CachedSequence, int], bool],
    ) -> None:
        """A block may be mapped in at most ``max_sharers`` buffers. If ``enabled`` is False,
        prompts find no blocks. Blocks are then shared only between answers to the same prompt.
        ``spares`` returns whether a sequence's block with this number is to be spared."""
        self.index = index
        self._clock = clock
        self._pool = pool
        self._pending = pending
        self._max_sharers = max_sharers
        self._enabled = enabled
        self._spares = spares
        self._full: deque[tuple[int, SequenceBlocks, int]] = deque()
        """``(epoch, sequence, block index)`` of full blocks to seal when step ``epoch``
        completes."""
        self.evicted_blocks = 0

    def match(self, hashes: BlockHashes, start: int, end: int) -> list[Block]:
        """Return the leading sealed blocks with the hashes ``start`` to ``end``."""
        blocks: list[Block] = []
        for number in range(start, end):
            block = self.find(hashes, number)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, hashes: BlockHashes, number: int) -> Block | None:
        """Return the block with this number if one more buffer may map it."""
        block = self.index.find(hashes, number)
        return None if block is None or self.has_max_sharers(block) else block

    def has_max_sharers(self, block: Block) -> bool:
        return block.buffers >= self._max_sharers

    def note_attached(self, own: SequenceBlocks, blocks: list[Block]) -> None:
        """Count a sequence as a user of the blocks that were just mapped at its table's end."""
        for number, block in enumerate(blocks, own.table.end - len(blocks)):
            if block.prefix is not None:
                self.index.use(block, self._spares(own.sequence, number))
            self._pool.attach(block)

    def explain(self, own: SequenceBlocks) -> tuple[int, MissReason | None]:
        """Return the result of the index, without a reason if sharing is disabled."""
        left_at, miss = self.index.explain(own.sequence.block_hashes, own.sealed_blocks)
        return left_at, miss if self._enabled else None

    def positions_to_share(self, own: SequenceBlocks) -> range:
        """Return the numbers of leading blocks that others can share once the sequence has computed
        them. There are none if this sequence may not use all cached blocks, because the index may
        have equal blocks already."""
        hashes, sealed = own.sequence.block_hashes, own.sealed_blocks
        may = self._enabled and hashes.max_cached_tokens is None and self.is_indexed(own, sealed)
        return range(sealed + 1, len(hashes.digests) + 1) if may else range(0)

    # --- sealing, publishing and freeing blocks ---------------------------------------------------

    def note_filled(self, epoch: int, own: SequenceBlocks, number: int) -> None:
        self._full.append((epoch, own, number))

    @property
    def is_sealing(self) -> bool:
        """True if steps that fill blocks have not completed."""
        return bool(self._full)

    def seal(self, completed_epoch: int) -> None:
        """Seal the blocks filled by steps up to ``completed_epoch``, so that others can share
        them."""
        while self._full and self._full[0][0] <= completed_epoch:
            _, own, number = self._full.popleft()
            if own.sequence.keeps_prefix:
                assert not number or own.table.at(number - 1).state is not BlockState.OWNED
                self._pool.seal(own.table.at(number))
                self._publish(own, number)

    def _publish(self, own: SequenceBlocks, number: int) -> None:
        """Put a sealed block in the index, in place of an equal cached block. Leave the block out
        if an equal block is in use, or if the block before is not in the index."""
        block, hashes = own.table.at(number), own.sequence.block_hashes
        if not self._enabled or not self.is_indexed(own, number):
            return
        equal, spared = self.index.find(hashes, number), self._spares(own.sequence, number)
        if equal is None:
            self.index.insert(hashes, number, block, spared)
        elif equal.state is BlockState.CACHED:
            self.index.replace(equal, block, spared)
            self._pool.free(equal)
        else:
            self._pending.withdraw(own.sequence)
        self._pending.remove(hashes.digests[number])

    def adopt(self, own: SequenceBlocks, number: int) -> bool:
        """Seal a block that was read from a file, and put it in the index. Return False and do
        nothing if the index has an equal one, or prompts would not find it."""
        hashes = own.sequence.block_hashes
        if not self.index.can_insert(hashes, number):
            return False
        block = own.table.at(number)
        self._pool.seal(block)
        self.index.insert(hashes, number, block, self._spares(own.sequence, number))
        return True

    def is_indexed(self, own: SequenceBlocks, length: int) -> bool:
        """Return True if the index has the sequence's block before place ``length``, or if there is
        none."""
        if length == 0:
            return True
        prefix = own.table.at(length - 1).prefix
        digests = own.sequence.block_hashes.digests
        return prefix is not None and prefix.digest == digests[length - 1]

    def close(self, own: SequenceBlocks, others: Mapping[int, SequenceBlocks]) -> None:
        """Detach a closing sequence from its blocks. If other sequences may not share the blocks
        that this one wrote, remove these blocks from the index. ``others`` are the open sequences
        by their ids."""
        sequence = own.sequence
        if not sequence.keeps_prefix and sequence.first_own is not None:
            for block in self.index.invalidate(sequence.block_hashes, sequence.first_own):
                self._pool.free(block)
            for owner in self._pending:
                waited_for = others[owner.seq_id]
                if not self.is_indexed(waited_for, waited_for.sealed_blocks):
                    self._pending.withdraw(owner)
        self._pool.detach(own.buffer.held)

    def cache_or_free(self, blocks: Iterable[Block]) -> None:
        """Note that a closed sequence's page table no longer lists ``blocks``. See ``let_go``."""
        self._clock.tick()
        self.let_go(blocks)

    def let_go(self, blocks: Iterable[Block]) -> None:
        """Note that a page table no longer lists ``blocks``. Of those in no other page table, cache
        the ones that the index has, and free the rest."""
        for block in blocks:
            if self._pool.remove_buffer(block):
                if block.prefix is None:
                    self._pool.free(block)
                else:
                    self._pool.cache(block)
                    self.index.note_cached(block)

    def evict(self, limit: int = 1) -> int:
        """Evict up to ``limit`` cached blocks, the least useful first; return their number."""
        evicted = 0
        while evicted < limit and (block := self.index.evict()) is not None:
            self._pool.free(block)
            evicted += 1
        self.evicted_blocks += evicted
        return evicted

    def check_invariants(self, sequences: Mapping[int, SequenceBlocks]) -> None:
        self.index.check_invariants()
        for owner in self._pending:
            own = sequences.get(owner.seq_id)
            assert own is not None, "a sequence that left is waited for"
            assert self.is_indexed(own, own.sealed_blocks), "an awaited block is lost"
