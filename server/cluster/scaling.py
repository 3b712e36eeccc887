"""How many replicas there are to be."""

import re
from dataclasses import dataclass

RANGE = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """The least and the most replicas. Where they differ, Ray decides."""

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
