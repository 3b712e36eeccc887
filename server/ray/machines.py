"""Counts how many replicas fit on a cluster's machines, as machines come and go."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

RANGE = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")
WATCH_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """The least and the largest number of replicas, between which Ray chooses by load."""

    minimum: int
    maximum: int

    @classmethod
    def read(cls, text: str) -> "ReplicaCounts":
        """Parse ``N`` or ``LEAST-MOST``. Raises ValueError."""
        match = RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text}: replicas are written N or LEAST-MOST, from 1 on")
        counts = cls(int(match[1]), int(match[2] or match[1]))
        if counts.maximum < counts.minimum:
            raise ValueError(f"{text}: the second number is the larger one")
        return counts

    def __str__(self) -> str:
        low, high = self.minimum, self.maximum
        return str(low) if low == high else f"{low}-{high}"


@dataclass(slots=True)
class MachineWatcher:
    """Adds replicas for machines that join a cluster. Removes none for machines that leave."""

    application: Any
    """The module server.ray.application."""
    plan: Any
    """The Plan of the application."""
    wanted: ReplicaCounts | None
    """If None, as many replicas as fit are deployed."""
    say: Callable[[str], None]
    room: int = 0
    """Number of replicas that fit on all machines together."""
    counts: ReplicaCounts = ReplicaCounts(0, 0)
    """The least and the largest number of replicas to deploy."""
    _fits: dict[str, bool] = field(default_factory=dict)
    """``{Ray's id of a machine: True if the machine can have a replica}``."""

    @property
    def unfit(self) -> list[str]:
        """Ids of machines that cannot serve. None is removed: that would restart all replicas."""
        return [node for node, fits in self._fits.items() if not fits]

    def look(self) -> bool:
        """Check machines that have joined. Return True if replicas must be deployed again."""
        before = self.counts, self.unfit
        hosts = self.application.machines()
        if new := [node for node in hosts if node not in self._fits]:
            reasons = self.application.unfit_machines(self.plan, new)
            self._fits |= {node: node not in reasons for node in new}
            for node, reason in reasons.items():
                self.say(f"no replica on {hosts[node]}: {reason}")
        self.room = self.plan.per_machine * sum(self._fits[node] for node in hosts)
        wanted = self.wanted or ReplicaCounts(self.room, self.room)
        self.counts = ReplicaCounts(
            max(self.counts.minimum, min(wanted.minimum, self.room)),
            max(self.counts.maximum, min(wanted.maximum, self.room)),
        )
        return before != (self.counts, self.unfit)

    def keep_looking(self, ended: threading.Event) -> None:
        """Deploy replicas on new machines until the event ``ended`` is set."""
        last, is_due = "", False
        while not ended.wait(WATCH_S):
            try:
                if is_due := self.look() or is_due:
                    self.application.resize(self.plan, self.counts, self.unfit)
                    self.say(f"replicas: {self.counts}")
                    is_due = False
            except Exception as error:  # such as a machine that has left: the loop tries again
                if not ended.is_set() and (reason := f"{type(error).__name__}: {error}") != last:
                    last = reason
                    self.say(f"the machines cannot be asked now: {reason}")
