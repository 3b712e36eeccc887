"""Remembers which replicas hold which prefixes, in a fixed amount of memory.

A block hash covers all blocks before it (``kvcache/block_hashes.py``). So one dictionary from
hashes to replicas is a radix tree of prompts, without nodes and edges.
"""

from collections import OrderedDict
from collections.abc import Sequence


class HeldPrefixes:
    """Finds the replicas that hold the beginning of a prompt.

    Replicas are numbered from 0, and sets of them are masks: bit i is replica i. A number of 1000
    bits takes 160 bytes; hashes of one prompt share one object, as they are on the same replicas.
    """

    def __init__(self, max_hashes: int) -> None:
        """max_hashes: how many are remembered; the least recently used ones are forgotten."""
        assert max_hashes > 0
        self._max_hashes = max_hashes
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        """Of each hash, the least recently used first. Never 0."""

    def __len__(self) -> int:
        """Return how many hashes are remembered."""
        return len(self._masks)

    def find(self, hashes: Sequence[bytes], among: int) -> list[tuple[int, int]]:
        """Return how many leading blocks are held, and by whom: ``(blocks, mask)``.

        Each mask is a part of the one before it, and holds more blocks. among: the replicas that
        count.
        """
        levels: list[tuple[int, int]] = []
        masks = self._masks
        holders = among
        for blocks, digest in enumerate(hashes):
            left = holders & masks.get(digest, 0)
            if left != holders:
                if blocks:
                    levels.append((blocks, holders))
                holders = left
                if not holders:
                    return levels
        if hashes and holders:
            levels.append((len(hashes), holders))
        return levels

    def expect(self, hashes: Sequence[bytes], replica: int) -> None:
        """Note that a replica is going to hold the prefix with these hashes: who asks for it
        meanwhile waits for it there."""
        self.add(hashes, replica)

    def add(self, hashes: Sequence[bytes], replica: int) -> None:
        """Note that a replica holds the prefix with these hashes, in their order from the first."""
        bit = 1 << replica
        masks = self._masks
        before, after = 0, bit
        # The longer prefix first, so that it is older and is forgotten first.
        for digest in reversed(hashes):
            mask = masks.get(digest, 0)
            if not mask & bit:
                if mask != before:
                    before, after = mask, mask | bit
                masks[digest] = after
            masks.move_to_end(digest)
        while len(masks) > self._max_hashes:
            masks.popitem(last=False)

    def discard(self, hashes: Sequence[bytes], replica: int) -> None:
        """Note that a replica has none of these blocks any more, whether it had them or not."""
        bit = 1 << replica
        for digest in hashes:
            if (mask := self._masks.get(digest, 0)) & bit:
                self._keep(digest, mask ^ bit)

    def forget(self, replicas: int) -> None:
        """Forget all that some replicas hold. replicas: a mask. Looks at every hash."""
        for digest, mask in [item for item in self._masks.items() if item[1] & replicas]:
            self._keep(digest, mask & ~replicas)

    def _keep(self, digest: bytes, mask: int) -> None:
        if mask:
            self._masks[digest] = mask
        else:
            del self._masks[digest]
