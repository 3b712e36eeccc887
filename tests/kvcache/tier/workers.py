"""The tier's threads, played by the thread of a test at moments that it chooses."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.tier.workers import Job, Workers


@dataclass
class PlayedWorkers(Workers):
    """Jobs are done in order when results are wanted, unless they are held back."""

    holds: Callable[[], bool] = lambda: False
    """Whether the next job is not done yet."""
    jobs: list[Job] = field(default_factory=list)

    def read(self, job: Job) -> None:
        self.jobs.append(job)

    write = read

    def run_results(self) -> None:
        while self.jobs and not self.holds():
            self.jobs.pop(0)()()

    def close(self, limit_s: float) -> bool:
        while self.jobs:
            self.jobs.pop(0)()()
        return True
