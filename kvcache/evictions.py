"""Remembers what was evicted, to tell "evicted" from "never cached"."""

from collections import OrderedDict

# Digests that are remembered, of blocks and of states each.
REMEMBERED_EVICTIONS = 65536


class Evictions:
    """The digests of what was evicted last, and has not come back since."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        """Return whether what has this digest was evicted."""
        return digest in self._digests

    def add(self, digest: bytes) -> None:
        """Remember a digest; forget the oldest one where there are too many."""
        self._digests[digest] = None
        if len(self._digests) > REMEMBERED_EVICTIONS:
            self._digests.popitem(last=False)

    def discard(self, digest: bytes) -> None:
        """Note that what has this digest is there again."""
        self._digests.pop(digest, None)
