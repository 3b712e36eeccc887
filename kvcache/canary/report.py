"""What a trial found, and how it crosses from one process to another."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was tried."""

    name: str
    passed: bool
    said: str
    """What was seen, for people."""
    seconds: float
    figures: dict[str, int | float] = field(default_factory=dict)
    """What was measured; bytes where the name says nothing else."""


@dataclass(frozen=True, slots=True)
class TrialReport:
    """The steps in order, up to the first one that failed."""

    steps: tuple[Step, ...]
    fault: str
    """What went wrong, as half a sentence; "" when nothing did."""
    seconds: float
    """From the start of the process to its end."""

    @property
    def passed(self) -> bool:
        """Whether everything that was tried works."""
        return not self.fault

    def as_json(self) -> dict[str, object]:
        """The same, of JSON's own types."""
        return {"passed": self.passed, **asdict(self)}


def to_line(steps: Iterable[Step]) -> str:
    """One line of JSON: what a trial's process ends with."""
    return json.dumps({"steps": [asdict(step) for step in steps]})


def from_line(line: str) -> tuple[Step, ...]:
    """Reads what ``to_line`` wrote. Raises ValueError for anything else."""
    try:
        found = json.loads(line)
        steps = tuple(Step(**step) for step in found["steps"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a report: {line[:200]!r}") from error
    if not steps:
        raise ValueError("a report of nothing")
    return steps


def fault_of(steps: Iterable[Step]) -> str:
    """The first step that failed, and why; "" when none did."""
    return next((f"{step.name}: {step.said}" for step in steps if not step.passed), "")
