"""The machines of a cluster, which come and go, and how many replicas they have room for."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

    def __str__(self) -> str:
        """Return them as they are read."""
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


WATCH_S = 2.0


class Fleet:
    """How many replicas there are to be. A machine that comes later gets one; where one leaves, its
    replica waits for a machine."""

    def __init__(
        self, application: Any, plan: Any, wanted: ReplicaCounts | None, say: Callable[[str], None]
    ) -> None:
        """application: the module, with its Plan; where it raises, the cluster cannot be asked now.
        wanted: None for as many as there is room for. say: tells a person."""
        self._application = application
        self._plan = plan
        self._wanted = wanted
        self._say = say
        self._fits: dict[str, bool] = {}
        """Whether a machine can have a replica, of all that were asked."""
        self.room = 0
        """Replicas that the machines have room for."""
        self.counts = ReplicaCounts(0, 0)
        """Replicas that there are to be."""

    @property
    def unfit(self) -> list[str]:
        """Return the machines that cannot have a replica. None is ever taken off: a change starts
        all replicas again."""
        return [node for node, fits in self._fits.items() if not fits]

    def look(self) -> bool:
        """Look which machines there are, and ask those that are new. Return whether other replicas
        are to be deployed."""
        before = self.counts, self.unfit
        there = self._application.machines()
        if new := [node for node in there if node not in self._fits]:
            why = self._application.unfit_machines(self._plan, new)
            self._fits |= {node: node not in why for node in new}
            for node, reason in why.items():
                self._say(f"no replica on {there[node]}: {reason}")
        self.room = self._plan.per_machine * sum(self._fits[node] for node in there)
        wanted = self._wanted or ReplicaCounts(self.room, self.room)
        self.counts = ReplicaCounts(
            max(self.counts.least, min(wanted.least, self.room)),
            max(self.counts.most, min(wanted.most, self.room)),
        )
        return before != (self.counts, self.unfit)

    def keep_looking(self, ended: threading.Event) -> None:
        """Deploy what machines that come have room for, until the event is set."""
        said, owed = "", False
        while not ended.wait(WATCH_S):
            try:
                if owed := self.look() or owed:
                    self._application.resize(self._plan, self.counts, self.unfit)
                    self._say(f"replicas: {self.counts}")
                    owed = False
            except Exception as error:  # a machine that goes meanwhile; it is looked at again
                if not ended.is_set() and (now := f"{type(error).__name__}: {error}") != said:
                    said = now
                    self._say(f"the machines cannot be asked now: {now}")
