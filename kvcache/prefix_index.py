"""The index that finds sealed blocks by the hash of their tokens, and chooses blocks to evict."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from enum import Enum
from hashlib import sha256
from heapq import heapify, heappop, heappush

from kvcache.block import Block, BlockState, Prefix
from kvcache.block_hashes import TOKEN_BYTES, BlockHashes
from kvcache.evictor import Evictions, UseClock

# An eviction queue is rebuilt if over half of its entries, and at least this many, are outdated.
STALE_QUEUE_ENTRIES = 64


class MissReason(Enum):
    """The reason that a prompt shares no more cached tokens: a name for reports, and an explanation
    for people. "There" is the position up to which K and V are cached."""

    NEVER_CACHED = "never_cached", "nobody with this key and salt has sent the tokens from there on"
    EVICTED = (
        "evicted",
        "the tokens from there on were evicted since, because memory was short or nobody used them "
        "for too long",
    )
    STATE_EVICTED = (
        "state_evicted",
        "the state of the recurrent layers there was evicted since, so all after an earlier state "
        "was computed again",
    )
    NO_STATE = (
        "no_state",
        "no state of the recurrent layers was kept there, so all after an earlier state was "
        "computed again",
    )

    message: str

    def __new__(cls, name: str, message: str) -> "MissReason":
        reason = object.__new__(cls)
        reason._value_, reason.message = name, message
        return reason


class PrefixIndex:
    """The index of sealed blocks, by the hash of all tokens up to the block's end.

    A block's children are the blocks that continue its prefix. A cached block has only cached
    children. Only blocks without children are evicted, the least recently used block first. Blocks
    of system prompts are spared while they are at most half of the cached blocks."""

    def __init__(self, clock: UseClock) -> None:
        self._clock = clock
        self._blocks: dict[bytes, Block] = {}
        self._children: dict[bytes, list[bytes]] = {}
        """The token ids of each block's children, sorted, by the hash of the parent block."""
        self._evicted = Evictions()
        self._queues: dict[bool, list[tuple[int, bytes]]] = {False: [], True: []}
        """``(last use, hash)`` of cached blocks without children, some outdated. Blocks of system
        prompts are under the key True."""
        self._cached = {False: 0, True: 0}
        """The number of cached blocks of system prompts (True) and of others (False)."""
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

    def insert(self, hashes: BlockHashes, number: int, block: Block, system: bool) -> None:
        """Add a sealed block that is in use. The block before must be in the index."""
        digest, parent = hashes.digests[number], hashes.parent(number)
        assert digest not in self._blocks
        assert number == 0 or parent in self._blocks
        tokens = hashes.tokens[number]
        block.prefix = Prefix(digest, parent, tokens, system)
        self._blocks[digest] = block
        self._evicted.discard(digest)
        insort(self._children.setdefault(parent, []), tokens)

    def replace(self, cached: Block, block: Block, system: bool) -> None:
        """Replace an equal cached block by ``block``, which is in use. ``cached`` can be freed."""
        assert cached.state is BlockState.CACHED
        self.use(cached, system)
        block.prefix, cached.prefix = cached.found_by, None
        self._blocks[block.prefix.digest] = block

    def use(self, block: Block, system: bool = False) -> None:
        """Note that a buffer will map the block. ``system`` is True for blocks of a system
        prompt."""
        prefix = block.found_by
        if block.state is BlockState.CACHED:
            self._cached[prefix.system] -= 1
        prefix.system = prefix.system or system

    def note_cached(self, block: Block) -> None:
        """Note that no buffer maps the block any more, so that it may be evicted."""
        assert block.state is BlockState.CACHED
        prefix = block.found_by
        prefix.last_use = self._clock.now
        self._cached[prefix.system] += 1
        self._queue_for_eviction(block)

    def cheapest(self) -> Block | None:
        """Return the cached block to evict next, or None if no block is cached."""
        spared = self._cached[True] <= self._cached[False]
        for system in (False, True) if spared else (True, False):
            queue = self._queues[system]
            while queue and not self._is_current(system, *queue[0]):
                heappop(queue)
            if queue:
                return self._blocks[queue[0][1]]
        return None

    def evict(self) -> Block | None:
        """Remove and return the cheapest cached block, or return None if no block is cached."""
        block = self.cheapest()
        if block is not None:
            self._evicted.add(block.found_by.digest)
            self._remove(block, evicted=True)
        return block

    def invalidate(self, block: Block) -> list[Block]:
        """Remove a block with doubtful contents and all its descendants. Return the cached ones."""
        following = [block]
        for parent in following:
            digest = parent.found_by.digest
            for tokens in self._children.get(digest, ()):
                following.append(self._blocks[sha256(digest + tokens).digest()])
        for gone in reversed(following):
            self._remove(gone, evicted=False)
        return [gone for gone in following if gone.state is BlockState.CACHED]

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

    def _is_current(self, system: bool, last_use: int, digest: bytes) -> bool:
        block = self._blocks.get(digest)
        if block is None or digest in self._children:
            return False
        prefix = block.found_by
        unused = block.state is BlockState.CACHED
        return unused and prefix.system == system and prefix.last_use == last_use

    def _queue_for_eviction(self, block: Block) -> None:
        prefix = block.found_by
        if block.state is not BlockState.CACHED or prefix.digest in self._children:
            return
        queue = self._queues[prefix.system]
        heappush(queue, (prefix.last_use, prefix.digest))
        if len(queue) > 2 * self._cached[prefix.system] + STALE_QUEUE_ENTRIES:
            queue[:] = {item for item in queue if self._is_current(prefix.system, *item)}
            heapify(queue)

    def _remove(self, block: Block, *, evicted: bool) -> None:
        prefix, block.prefix = block.found_by, None
        assert prefix.digest not in self._children
        self.on_removal(prefix.digest, evicted)
        del self._blocks[prefix.digest]
        if block.state is BlockState.CACHED:
            self._cached[prefix.system] -= 1
        siblings = self._children[prefix.parent]
        del siblings[bisect_left(siblings, prefix.tokens)]
        if not siblings:
            del self._children[prefix.parent]
            if (parent := self._blocks.get(prefix.parent)) is not None:
                self._queue_for_eviction(parent)

    def check_invariants(self) -> None:
        assert sum(map(len, self._children.values())) == len(self._blocks)
        queued = {(kind, *item) for kind in (False, True) for item in self._queues[kind]}
        counted = Counter[bool]()
        for digest, block in self._blocks.items():
            prefix, cached = block.found_by, block.state is BlockState.CACHED
            assert prefix.digest == digest
            parent = self._blocks.get(prefix.parent)
            orphan = parent is not None and parent.state is BlockState.CACHED and not cached
            assert not orphan, "a child in use, a cached parent"
            leaf = cached and digest not in self._children
            assert not leaf or (prefix.system, prefix.last_use, digest) in queued
            counted[prefix.system] += cached
        assert all(counted[system] == count for system, count in self._cached.items())


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
