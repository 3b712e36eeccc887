"""Rounds, the rows that they give, and the table of rows."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

HEADINGS = ("row", "instruction set", "quire", "peer", "ratio", "target", "")


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds that stop by themselves on a slow machine."""

    most: int
    limit_s: float

    def __iter__(self) -> Iterator[int]:
        """Yield numbers from 0: at least one, and none that would begin after the limit."""
        deadline_s = time.monotonic() + self.limit_s
        for number in range(self.most):
            if number and time.monotonic() > deadline_s:
                return
            yield number


@dataclass(frozen=True, slots=True)
class Goal:
    text: str
    met: bool

    @classmethod
    def at_least(cls, ratio: float, least: float) -> "Goal":
        return cls(f"ratio >= {least:g}", ratio >= least)

    @classmethod
    def at_most(cls, value: float, most: float, unit: str) -> "Goal":
        return cls(f"<= {most:.0f} {unit}", value <= most)


@dataclass(frozen=True, slots=True)
class Figures:
    """The median, the lowest and the highest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> "Figures":
        """Return nothing but NaN if one round is not a number."""
        if any(math.isnan(figure) for figure in rounds):
            return cls(math.nan, math.nan, math.nan)
        return cls(statistics.median(rounds), min(rounds), max(rounds))

    def text(self) -> str:
        if not self.low < self.high:
            return figure(self.median)
        return f"{figure(self.median)} ({figure(self.low)}..{figure(self.high)})"


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians; low and high are of single rounds and show how steady the machine was."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, over: Sequence[float], under: Sequence[float]) -> "Ratio":
        rounds = Figures.of([a / b for a, b in zip(over, under, strict=True)])
        return cls(Figures.of(over).median / Figures.of(under).median, rounds.low, rounds.high)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. A ratio above 1 is always in quire's favour."""

    name: str
    unit: str
    ours: Figures
    peer_name: str
    theirs: Figures
    ratio: Ratio
    goal: Goal | None = None
    instruction_set: str = ""
    """That our side ran with; empty: the best one that this processor has."""

    @property
    def quire(self) -> float:
        return self.ours.median

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        ours: Sequence[float],
        peer: tuple[str, Sequence[float]],
        least: float | None = None,
    ) -> "Row":
        """Compare one figure per round: a rate, in units per second, is better when it is higher,
        another figure when it is lower. least: the ratio to reach."""
        peer_name, theirs = peer
        sides = (ours, theirs) if unit.endswith("/s") else (theirs, ours)
        ratio = Ratio.of(*sides)
        known = least is not None and not math.isnan(ratio.value)
        goal = Goal.at_least(ratio.value, least) if least is not None and known else None
        return cls(name, unit, Figures.of(ours), peer_name, Figures.of(theirs), ratio, goal)

    def with_goal(self, goal: Goal) -> "Row":
        return replace(self, goal=goal)

    def run_with(self, instruction_set: str) -> "Row":
        """Return the row with its instruction set, unless it has one."""
        return replace(self, instruction_set=self.instruction_set or instruction_set)

    def cells(self) -> tuple[str, ...]:
        verdict = "" if self.goal is None else "met" if self.goal.met else "MISSED"
        return (
            f"{self.name}, {self.unit}",
            self.instruction_set,
            self.ours.text(),
            f"{self.theirs.text()}  {self.peer_name}",
            Figures(self.ratio.value, self.ratio.low, self.ratio.high).text(),
            "-" if self.goal is None else self.goal.text,
            verdict,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one part of the benchmark, and the facts below the table."""

    rows: list[Row]
    facts: list[tuple[str, str]] = field(default_factory=list)


def figure(value: float) -> str:
    """Format with three digits or more, without an exponent; a dash for NaN."""
    if math.isnan(value):
        return "-"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def render(rows: Sequence[Row]) -> str:
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
