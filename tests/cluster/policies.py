"""Ways to choose a replica, side by side: quire's, and those that know nothing of prefixes."""

from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from random import Random
from typing import Protocol

from engine.types import PrefixNews
from server.cluster.prefix_router import Flight, Load, PrefixRouter


class Policy(Protocol):
    """Chooses, and is told what becomes of requests."""

    matched: int
    """Blocks that the one chosen last was thought to hold."""

    def choose(self, hashes: Sequence[bytes], tokens: int) -> str: ...
    def sent(
        self, replica: str, hashes: Sequence[bytes], tokens: int, ends: Sequence[int] = ()
    ) -> Flight | None: ...
    def started(self, replica: str, flight: Flight | None) -> None: ...
    def finished(self, replica: str, flight: Flight | None, hashes: Sequence[bytes]) -> None: ...
    def report(self, replica: str, load: Load, news: PrefixNews) -> None: ...


class RoundRobin:
    """One after the other."""

    matched = 0

    def __init__(self, names: Sequence[str]) -> None:
        self._next = cycle(names)

    def choose(self, hashes: Sequence[bytes], tokens: int) -> str:
        return next(self._next)

    def sent(
        self, replica: str, hashes: Sequence[bytes], tokens: int, ends: Sequence[int] = ()
    ) -> None:
        """It counts nothing."""

    def started(self, replica: str, flight: Flight | None) -> None:
        """It counts nothing."""

    def finished(self, replica: str, flight: Flight | None, hashes: Sequence[bytes]) -> None:
        """It counts nothing."""

    def report(self, replica: str, load: Load, news: PrefixNews) -> None:
        """It listens to nobody."""


class TwoChoices(RoundRobin):
    """Of two that are drawn, the one with fewer requests in flight, which it knows exactly."""

    def __init__(self, names: Sequence[str], seed: int = 0) -> None:
        self._names = list(names)
        self._random = Random(seed)
        self._flying: Counter[str] = Counter()

    def choose(self, hashes: Sequence[bytes], tokens: int) -> str:
        two = self._random.sample(self._names, min(2, len(self._names)))
        return min(two, key=lambda name: self._flying[name])

    def sent(
        self, replica: str, hashes: Sequence[bytes], tokens: int, ends: Sequence[int] = ()
    ) -> None:
        self._flying[replica] += 1

    def finished(self, replica: str, flight: Flight | None, hashes: Sequence[bytes]) -> None:
        self._flying[replica] -= 1


class ByPrefix:
    """The production router."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        max_hashes: int,
        block_tokens: int,
        keeps_states: bool = False,
    ) -> None:
        self.router = PrefixRouter(
            max_hashes=max_hashes, block_tokens=block_tokens, keeps_states=keeps_states
        )
        self.router.set_replicas(names)
        self.matched = 0
        self._reports = 0
        self.reasons: Counter[str] = Counter()

    def choose(self, hashes: Sequence[bytes], tokens: int) -> str:
        choice = self.router.choose(hashes, tokens)
        assert choice is not None
        self.reasons[choice.reason.value] += 1
        self.matched = choice.matched_blocks
        return choice.replica

    def sent(
        self, replica: str, hashes: Sequence[bytes], tokens: int, ends: Sequence[int] = ()
    ) -> Flight:
        return self.router.sent(replica, hashes, tokens, ends)

    def started(self, replica: str, flight: Flight | None) -> None:
        assert flight is not None
        self.router.started(flight)

    def finished(self, replica: str, flight: Flight | None, hashes: Sequence[bytes]) -> None:
        assert flight is not None
        self.router.finished(flight, hashes)

    def report(self, replica: str, load: Load, news: PrefixNews) -> None:
        self.router.report_load(replica, load)
        self.router.report_evicted(replica, news.evicted)
        if news.states is not None:
            self._reports += 1
            self.router.report_states(replica, self._reports, news.states)
