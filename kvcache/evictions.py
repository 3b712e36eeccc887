"""Remembers what was evicted, to tell "evicted" from "never cached"."""

from collections import OrderedDict, deque
from typing import NamedTuple

# Digests that are remembered, of blocks and of states each.
REMEMBERED_EVICTIONS = 65536
# Those that whoever asks from time to time is told; of more, the newest.
REPORTED_EVICTIONS = 4096
# States that are named at once; of more, those used last.
REPORTED_STATES = 1024


class PrefixNews(NamedTuple):
    """What whoever sends prompts to an engine wants to know of what these may begin with. Block
    hashes name prefixes."""

    evicted: list[bytes]
    """Those that were evicted since it was asked last, in any order."""
    states: list[bytes] | None
    """Those after which a state is kept, all of them, the one used last first. None where the model
    needs none; else nothing begins anywhere but there."""


class Evictions:
    """The digests of what was evicted last, and has not come back since."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()
        self._unreported: deque[bytes] = deque(maxlen=REPORTED_EVICTIONS)

    def __contains__(self, digest: bytes) -> bool:
        """Return whether what has this digest was evicted."""
        return digest in self._digests

    def add(self, digest: bytes) -> None:
        """Remember a digest; forget the oldest one where there are too many."""
        self._digests[digest] = None
        self._unreported.append(digest)
        if len(self._digests) > REMEMBERED_EVICTIONS:
            self._digests.popitem(last=False)

    def discard(self, digest: bytes) -> None:
        """Note that what has this digest is there again."""
        self._digests.pop(digest, None)

    def take_unreported(self) -> list[bytes]:
        """Return the digests of what was evicted since the last call, but for what is there again;
        of very many the newest."""
        found = [digest for digest in self._unreported if digest in self._digests]
        self._unreported.clear()
        return found
