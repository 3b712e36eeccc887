"""What led to what went wrong."""

from dataclasses import dataclass

from engine.step.plan import StepPlan
from engine.types import TokenEvent


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A step, to be written down only when it matters."""

    now: float
    live: int
    plan: StepPlan | None
    refused: int
    ends: list[TokenEvent]

    def __str__(self) -> str:
        entries = self.plan.entries if self.plan else []
        runs = ", ".join(f"{e.seq_id}[{e.start}+{e.count}]" for e in entries)
        refusals = f"; {self.refused} refusals" if self.refused else ""
        ends = "".join(f"; {e.request_id} {e.finish.value}" for e in self.ends if e.finish)
        return f"{self.now:9.4f} s  {self.live:2} live  runs {runs or 'nothing'}{refusals}{ends}"


class SeedFailedError(Exception):
    """A seed under which something went wrong, with what led to it."""

    def __init__(self, seed: int, reason: str, trace: str) -> None:
        super().__init__(seed, reason, trace)
        self.seed = seed
        self.reason = reason
        self.trace = trace

    def __str__(self) -> str:
        again = f"again: python -m tests.simulation --seed {self.seed}"
        return f"{self.trace}\nseed {self.seed}: {self.reason}\n{again}"
