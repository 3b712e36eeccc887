"""How often something is measured: enough for a median, but not for ever."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.bench.plot import Curve
from tests.bench.table import Row


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds that stop by themselves on a machine that is slower than expected."""

    most: int
    limit_s: float

    def __iter__(self) -> Iterator[int]:
        """Numbers from 0: at least one, and none that would begin after the limit."""
        deadline_s = time.monotonic() + self.limit_s
        for number in range(self.most):
            if number and time.monotonic() > deadline_s:
                return
            yield number


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of the benchmark has found."""

    rows: list[Row]
    facts: list[tuple[str, str]] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
