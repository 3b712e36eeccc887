"""Decides what is evicted, by the tokens that a cached block or state slot saves from being
computed again.

Each group of layers has memory of its own. A group that runs out of blocks or of slots therefore
evicts its own ones. All groups compete when memory is to go back to the system: ``evict_cheapest``
(groups/base.py) then compares what each of them would evict next, by one number."""

import math
from collections import OrderedDict

# The most blocks and slots to evict at once. This many take 30 ms.
EVICTED_AT_ONCE = 4096
# The number of hashes that one ``Evictions`` stores.
REMEMBERED_EVICTIONS = 65536
NOTHING_TO_EVICT = math.inf


class UseClock:
    """The cache's time, by which all groups measure age: the number of uses of cached prefixes."""

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> None:
        self.now += 1

    def worth(self, saved_tokens: float, last_use: int) -> float:
        """Return the worth of a block or slot: the expected number of tokens that it saves from
        being computed again, divided by the uses since its last one."""
        return saved_tokens / (self.now - last_use + 1)


class Evictions:
    """Hashes of the newest evicted prefixes, to tell "evicted" from "never cached"."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def add(self, digest: bytes) -> None:
        self._digests[digest] = None
        if len(self._digests) > REMEMBERED_EVICTIONS:
            self._digests.popitem(last=False)

    def discard(self, digest: bytes) -> None:
        self._digests.pop(digest, None)
