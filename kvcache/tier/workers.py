"""The tier's threads: some read, one writes. They touch files and lent memory, nothing else."""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

Job = Callable[[], Callable[[], None]]
"""Runs on a thread of the tier, and returns what the engine's thread is to do then."""
READERS = 4
# How often the writer takes over what other processes have written, while it has nothing to do.
REFRESH_S = 5.0


class Workers:
    """Daemon threads, because a transfer on a disk that is gone may never end."""

    def __init__(self, refresh: Callable[[], None]) -> None:
        self._refresh = refresh
        self._reads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run_writer, daemon=True, name="tier-write")]
        self._threads += [
            threading.Thread(target=self._run_reader, daemon=True, name=f"tier-read-{number}")
            for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, job: Job) -> None:
        self._reads.put(job)

    def write(self, job: Job) -> None:
        self._writes.put(job)

    def run_results(self) -> None:
        """Run what ended jobs have returned. Raises what a job has raised: a bug, or a device that
        failed. No thread ends because of it."""
        while not self._results.empty():
            self._results.get()()

    def close(self, limit_s: float) -> bool:
        """End all threads after the jobs in the queues. Return False if that takes longer."""
        self._writes.put(None)
        for _ in range(READERS):
            self._reads.put(None)
        end = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run_reader(self) -> None:
        while (job := self._reads.get()) is not None:
            self._run(job)

    def _run_writer(self) -> None:
        while True:
            try:
                job = self._writes.get(timeout=REFRESH_S)
            except queue.Empty:
                self._refresh()
                continue
            if job is None:
                return
            self._run(job)

    def _run(self, job: Job) -> None:
        try:
            self._results.put(job())
        except BaseException as error:
            self._results.put(partial(_raise, error))


def _raise(error: BaseException) -> None:
    raise error
