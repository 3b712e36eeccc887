"""A part of what is planted, where all of it takes too long."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

Its = TypeVar("Its")
TODAY = "today"


def part_of(every: Sequence[Its], which: str) -> Sequence[Its]:
    """Every N-th from the K-th on. which: ``K/N``, K from 1 on; ``today/N`` is another one every
    day."""
    named, _, step = which.partition("/")
    first = datetime.now(UTC).toordinal() % int(step) + 1 if named == TODAY else int(named)
    assert 1 <= first <= int(step), which
    return every[first - 1 :: int(step)]
