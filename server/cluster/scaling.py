"""How many replicas are needed, by what their engines say of their queues and blocks.

One more where requests wait, or where sequences fill the blocks: the next request would evict what
conversations need, or wait. One less only where the others would have room to spare, since with a
replica the prefixes that it holds are gone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from engine.types import EngineStats

RANGE = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """The least and the most replicas. Where they differ, need decides."""

    least: int
    most: int

    @classmethod
    def read(cls, text: str) -> "ReplicaCounts":
        """Read ``N`` or ``LEAST-MOST``. Raises ValueError."""
        found = RANGE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text}: replicas are written N or LEAST-MOST, from 1 on")
        least = int(found[1])
        most = int(found[2] or least)
        if most < least:
            raise ValueError(f"{text}: the second number is the larger one")
        return cls(least, most)

    def within(self, room: int) -> "ReplicaCounts":
        """Return as many of them as there is room for."""
        return ReplicaCounts(min(self.least, room), min(self.most, room))

    def grown(self, other: "ReplicaCounts") -> "ReplicaCounts":
        """Return the larger numbers of both."""
        return ReplicaCounts(max(self.least, other.least), max(self.most, other.most))

    def __str__(self) -> str:
        """Return them as they are read."""
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


# Requests that wait for a slot or for blocks, on average over the replicas: not passing ones.
CROWDED_WAITING = 0.5
# The engine's own question whether it still generates waits as well, for a moment.
CALM_WAITING = 0.1
# The share of slots, or of blocks, that is in use. Beyond the first one, requests will wait soon;
# below the second one there is room to spare.
CROWDED_SHARE = 0.9
CALM_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Need:
    """What an engine says of itself; figures of several moments may be averaged."""

    waiting: float
    """Requests that have not begun."""
    slots_share: float
    """Of the sequences that may run at once, the part that runs."""
    blocks_share: float
    """Of all blocks, the part that sequences hold. What is only cached may be evicted."""

    def figures(self) -> dict[str, float]:
        """Return it as ``needs`` reads it."""
        return asdict(self)


def need_of(stats: EngineStats, max_num_seqs: int) -> Need:
    blocks_share = 0.0
    if (kv := stats.kv) is not None:
        held = kv.live_bytes + kv.partial_tail_bytes
        blocks_share = held / kv.capacity_bytes
    return Need(float(stats.waiting), stats.running / max_num_seqs, blocks_share)


def needs(figures: Mapping[str, Mapping[Any, float]]) -> list[Need]:
    """Return what replicas need of which all figures are known. figures: of each replica, by their
    names."""
    columns = [figures.get(field.name, {}) for field in fields(Need)]
    known = set(columns[0]).intersection(*columns[1:])
    return [Need(*(column[replica] for column in columns)) for replica in known]


def wanted_replicas(needs: Sequence[Need], there_are: int) -> int:
    """Return how many replicas there should be: one more or less than there are, or as many. needs:
    of those that have said what they need. there_are: those that have not included."""
    if len(needs) < there_are:
        # One has just come: what it takes off the others is not seen yet.
        return there_are
    slots = sum(its.slots_share for its in needs)
    blocks = sum(its.blocks_share for its in needs)
    waiting = sum(its.waiting for its in needs)
    if waiting > CROWDED_WAITING * there_are or max(slots, blocks) > CROWDED_SHARE * there_are:
        return there_are + 1
    spare = CALM_SHARE * (there_are - 1)
    if there_are > 1 and waiting < CALM_WAITING * there_are and max(slots, blocks) <= spare:
        return there_are - 1
    return there_are
