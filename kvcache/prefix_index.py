"""Finds sealed blocks by what they hold, and chooses which one is evicted first.

Blocks are found by their hashes, and their token ids are compared all the same.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from heapq import heapify, heappop, heappush

from kvcache.block_hashes import TOKEN_BYTES, BlockHashes
from kvcache.sparse_heap import BlockRef

# Digests of evicted blocks that are remembered, to tell "evicted" from "never cached".
REMEMBERED_EVICTIONS = 65536
# A queue of blocks to evict is rebuilt when half of it and so many entries are out of date.
STALE_QUEUE_ENTRIES = 64


class MissReason(Enum):
    """Why a prompt shares no more of what is cached."""

    NEVER_CACHED = "never_cached"
    EVICTED = "evicted"
    OTHER_SALT = "other_salt"
    """The same tokens are cached under another ``cache_salt`` of the same tenant."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A sealed block that can be found again."""

    digest: bytes
    parent: bytes
    unsalted_digest: bytes
    tokens: bytes
    block: BlockRef
    system: bool
    """Whether it belongs to a system prompt."""
    last_use: int = 0
    idle: bool = False
    """Whether no buffer has it mapped: it may be evicted."""


class PrefixIndex:
    """Finds sealed blocks by their hashes, and chooses which one to evict.

    A sequence that has a block mapped has its parents mapped as well, so an idle block has idle
    children only. Leaves are evicted first, the one longest unused before others. Blocks of system
    prompts stay while there are as many others.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, CachedBlock] = {}
        self._by_block: dict[BlockRef, CachedBlock] = {}
        self._children: dict[bytes, list[bytes]] = {}
        """By the parent's digest: token ids of the blocks that follow it, sorted."""
        self._unsalted: Counter[bytes] = Counter()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._queues: dict[bool, list[tuple[int, bytes]]] = {False: [], True: []}
        """Idle leaves by last use: of system prompts, and others. Some entries are out of date."""
        self._idle = {False: 0, True: 0}
        self._uses = 0

    def __len__(self) -> int:
        """Return how many blocks can be found."""
        return len(self._entries)

    def find(self, hashes: BlockHashes, number: int) -> CachedBlock | None:
        """Return the block with this hash and these ids; None where there is none."""
        entry = self._entries.get(hashes.digests[number])
        return entry if entry is not None and entry.tokens == hashes.tokens[number] else None

    def at(self, block: BlockRef) -> CachedBlock | None:
        """Return the entry of a physical block; None where it cannot be found."""
        return self._by_block.get(block)

    # --- in -------------------------------------------------------------------------------------

    def insert(self, hashes: BlockHashes, number: int, block: BlockRef, system: bool) -> None:
        """Insert a sealed block that is in use. Its parent is in the index."""
        digest, parent = hashes.digests[number], hashes.parent(number)
        assert digest not in self._entries
        assert number == 0 or parent in self._entries
        tenant = hashes.unsalted_digests[number]
        entry = CachedBlock(digest, parent, tenant, hashes.tokens[number], block, system)
        self._entries[digest] = self._by_block[block] = entry
        self._unsalted[tenant] += 1
        self._evicted.pop(digest, None)
        insort(self._children.setdefault(parent, []), entry.tokens)

    def replace(self, entry: CachedBlock, block: BlockRef, system: bool) -> BlockRef:
        """Keep a block that is in use in place of an idle one with the same tokens. Return the idle
        one: it can be freed."""
        assert entry.idle
        old, entry.block = entry.block, block
        del self._by_block[old]
        self._by_block[block] = entry
        self.use(entry, system)
        return old

    def use(self, entry: CachedBlock, system: bool = False) -> None:
        """Note that a buffer maps the block. system: as part of a system prompt."""
        if entry.idle:
            entry.idle = False
            self._idle[entry.system] -= 1
        entry.system = entry.system or system

    # --- out ------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Advance the clock of uses: what becomes idle from now on was used later."""
        self._uses += 1

    def make_idle(self, entry: CachedBlock) -> None:
        """Make the block evictable: no buffer maps it any more."""
        assert not entry.idle
        entry.idle, entry.last_use = True, self._uses
        self._idle[entry.system] += 1
        self._queue_for_eviction(entry)

    def evict(self) -> BlockRef | None:
        """Remove the block that is likely to be missed least; None when all are in use."""
        spared = self._idle[True] <= self._idle[False]
        for system in (False, True) if spared else (True, False):
            queue = self._queues[system]
            while queue:
                last_use, digest = heappop(queue)
                if self._is_current(system, last_use, digest):
                    self._remember_eviction(digest)
                    return self._remove(self._entries[digest])
        return None

    def invalidate(self, entry: CachedBlock) -> list[BlockRef]:
        """Remove a block whose contents are in doubt, and all that follow it. Return the idle ones
        among them: these can be freed."""
        following = [entry]
        for parent in following:
            for tokens in self._children.get(parent.digest, ()):
                following.append(self._entries[sha256(parent.digest + tokens).digest()])
        idle = [gone.block for gone in following if gone.idle]
        for gone in reversed(following):
            self._remove(gone)
        return idle

    # --- why not --------------------------------------------------------------------------------

    def explain(self, hashes: BlockHashes, matched: int) -> tuple[int, MissReason | None]:
        """Return why a prompt found no more than ``matched`` blocks: the first token at which it
        left the longest cached prefix, and the reason; None when no more could have been shared."""
        size = hashes.tokens_per_block
        full = matched < len(hashes.digests)
        siblings = self._children.get(hashes.parent(matched), [])
        left_at = matched * size + _common(
            siblings, hashes.tokens[matched] if full else hashes.tail
        )
        if matched >= hashes.shareable_blocks:
            return left_at, None
        if hashes.digests[matched] in self._evicted:
            return left_at, MissReason.EVICTED
        if self._unsalted[hashes.unsalted_digests[matched]]:
            return left_at, MissReason.OTHER_SALT
        return left_at, MissReason.NEVER_CACHED

    # --- inside ---------------------------------------------------------------------------------

    def _is_current(self, system: bool, last_use: int, digest: bytes) -> bool:
        """Return whether an entry of a queue is up to date."""
        entry = self._entries.get(digest)
        if entry is None or digest in self._children:
            return False
        return entry.idle and entry.system == system and entry.last_use == last_use

    def _queue_for_eviction(self, entry: CachedBlock) -> None:
        """Queue an idle leaf for eviction."""
        if not entry.idle or entry.digest in self._children:
            return
        queue = self._queues[entry.system]
        heappush(queue, (entry.last_use, entry.digest))
        if len(queue) > 2 * self._idle[entry.system] + STALE_QUEUE_ENTRIES:
            queue[:] = {item for item in queue if self._is_current(entry.system, *item)}
            heapify(queue)

    def _remember_eviction(self, digest: bytes) -> None:
        self._evicted[digest] = None
        if len(self._evicted) > REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    def _remove(self, entry: CachedBlock) -> BlockRef:
        assert entry.digest not in self._children
        del self._entries[entry.digest], self._by_block[entry.block]
        self._unsalted[entry.unsalted_digest] -= 1
        if not self._unsalted[entry.unsalted_digest]:
            del self._unsalted[entry.unsalted_digest]
        if entry.idle:
            self._idle[entry.system] -= 1
        siblings = self._children[entry.parent]
        del siblings[bisect_left(siblings, entry.tokens)]
        if not siblings:
            del self._children[entry.parent]
            if (parent := self._entries.get(entry.parent)) is not None:
                self._queue_for_eviction(parent)
        return entry.block

    def check_invariants(self) -> None:
        """Count again from the entries. Raises AssertionError."""
        assert {e.block for e in self._entries.values()} == set(self._by_block)
        assert sum(map(len, self._children.values())) == len(self._entries)
        queued = {(kind, *item) for kind in (False, True) for item in self._queues[kind]}
        for entry in self._entries.values():
            parent = self._entries.get(entry.parent)
            assert parent is None or entry.idle or not parent.idle, "a child in use, an idle parent"
            leaf = entry.idle and entry.digest not in self._children
            assert not leaf or (entry.system, entry.last_use, entry.digest) in queued
        for system, count in self._idle.items():
            idle = [e for e in self._entries.values() if e.idle and e.system == system]
            assert len(idle) == count


def _common(sorted_ids: list[bytes], ids: bytes) -> int:
    """Return how many leading tokens ``ids`` has in common with the most similar one of the sorted
    ones: a neighbour of its place among them."""
    place = bisect_left(sorted_ids, ids)
    return max(
        (_common_tokens(other, ids) for other in sorted_ids[max(0, place - 1) : place + 1]),
        default=0,
    )


def _common_tokens(one: bytes, other: bytes) -> int:
    shorter = min(len(one), len(other))
    different = (i for i in range(shorter) if one[i] != other[i])
    return next(different, shorter) // TOKEN_BYTES
