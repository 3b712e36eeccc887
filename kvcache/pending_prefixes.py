"""Blocks that open sequences are going to compute. Other sequences may wait for them."""

from collections.abc import Iterable, Iterator

from kvcache.block_hashes import BlockHashes
from kvcache.sequences import CachedSequence


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
