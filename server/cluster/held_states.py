"""Remembers which replicas can go on from which prefixes, of a model with recurrent layers.

Such a model goes on from a state or not at all, and few are kept. So a replica reports all that it
keeps, each time, and what one report gets wrong the next one mends. Between reports it is taken for
keeping what was sent to it: a conversation's next turn may come sooner than a report.
"""

import math
from collections.abc import Sequence

# A state that was expected is forgotten where so many reports have not named it: the first ones may
# have been made before it was.
REPORTS_AWAITED = 3


class HeldStates:
    """Finds the replicas that keep a state after the beginning of a prompt.

    Replicas are numbered from 0, and sets of them are masks, as in HeldPrefixes.
    """

    def __init__(self, max_hashes: int) -> None:
        """max_hashes: how many are remembered; beyond that no new ones."""
        assert max_hashes > 0
        self._max_hashes = max_hashes
        self._masks: dict[bytes, int] = {}
        """Of each hash. Never 0."""
        self._until: dict[int, dict[bytes, float]] = {}
        """By replica: hashes, and the number of the first report that forgets them."""
        self._reports: dict[int, int] = {}
        """By replica: the number of the newest report."""

    def __len__(self) -> int:
        """Return how many hashes are remembered."""
        return len(self._masks)

    def find(self, hashes: Sequence[bytes], among: int) -> list[tuple[int, int]]:
        """Return after how many leading blocks a state is kept, and by whom: ``(blocks, mask)``.

        Each mask is a part of the one before it, and has later states. among: the replicas that
        count.
        """
        levels: list[tuple[int, int]] = []
        holders = 0
        for blocks in range(len(hashes), 0, -1):
            mask = self._masks.get(hashes[blocks - 1], 0) & among
            if mask & ~holders:
                holders |= mask
                levels.append((blocks, holders))
        return levels[::-1]

    def expect(self, hashes: Sequence[bytes], replica: int) -> None:
        """Note that a replica is going to keep states after these, whatever it reports meanwhile:
        until ``add`` or ``discard``."""
        self._remember(hashes, replica, math.inf)

    def add(self, hashes: Sequence[bytes], replica: int) -> None:
        """Note that a replica keeps states after these; its reports will say so."""
        self._remember(hashes, replica, self._reports.get(replica, 0) + REPORTS_AWAITED)

    def discard(self, hashes: Sequence[bytes], replica: int) -> None:
        """Note that a replica has no state after any of these, whether it had one or not."""
        until = self._until.get(replica, {})
        for digest in hashes:
            if until.pop(digest, None) is not None:
                self._remove(digest, 1 << replica)

    def report(self, hashes: Sequence[bytes], replica: int, number: int) -> None:
        """Take in which states a replica keeps: all of them. number: of the report; an older one
        than the newest, or the same again, says nothing."""
        if number <= self._reports.get(replica, 0):
            return
        self._reports[replica] = number
        kept = set(hashes)
        until = self._until.get(replica, {})
        gone = [its for its, last in until.items() if last <= number and its not in kept]
        self.discard(gone, replica)
        # Those that are still expected stay so: whoever expects them says when they are there.
        new = [digest for digest in kept if until.get(digest, 0) <= number]
        self._remember(new, replica, number + 1)

    def forget(self, replicas: int) -> None:
        """Forget all that some replicas have. replicas: a mask."""
        for replica in [its for its in self._until if replicas >> its & 1]:
            self.discard([*self._until[replica]], replica)
            del self._until[replica]
        for replica in [its for its in self._reports if replicas >> its & 1]:
            del self._reports[replica]

    def _remember(self, hashes: Sequence[bytes], replica: int, last: float) -> None:
        until, bit = self._until.setdefault(replica, {}), 1 << replica
        for digest in hashes:
            mask = self._masks.get(digest, 0)
            if mask or len(self._masks) < self._max_hashes:
                self._masks[digest] = mask | bit
                until[digest] = last

    def _remove(self, digest: bytes, bit: int) -> None:
        if left := self._masks[digest] & ~bit:
            self._masks[digest] = left
        else:
            del self._masks[digest]
