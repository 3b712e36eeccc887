"""The tier's threads, played by the thread of a test at moments that it chooses."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvcache.tier.workers import Job, Workers


@dataclass
class PlayedWorkers(Workers):
    """Jobs are done in order when results are wanted, unless they are held back."""

    holds: Callable[[], bool] = lambda: False
    """Whether the next job is not done yet."""
    begins: Callable[[], bool] = lambda: False
    """Whether the next job is done before it is known what became of the last one."""
    jobs: list[Job] = field(default_factory=list)
    results: list[Callable[[], None]] = field(default_factory=list)

    def read(self, job: Job) -> None:
        self.jobs.append(job)

    write = read

    def run_results(self) -> None:
        while self.jobs or self.results:
            if self.results and not (self.jobs and self.begins()):
                self.results.pop(0)()
            elif self.holds():
                return
            else:
                self.results.append(self.jobs.pop(0)())

    def close(self, limit_s: float) -> bool:
        self.holds = lambda: False
        self.run_results()
        return True
