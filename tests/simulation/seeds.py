"""Runs lists of seeds, and keeps those that failed."""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from tests.simulation.faults import SeedFailedError
from tests.simulation.simulator import Simulation

SEEDS_FILE = Path(__file__).parent / "seeds.txt"
SEEDS_PER_TASK = 50
PROCESSES = 2

Outcome = tuple[Counter[str], list[SeedFailedError]]


def run_seeds(seeds: Iterable[int], groups: int = 1, *, states: bool = False) -> Outcome:
    """Run seeds one after the other; return counts of events, and failures. groups: of the cache.
    states: whether the model has recurrent layers."""
    counts: Counter[str] = Counter()
    failures = []
    with silence():
        for seed in seeds:
            try:
                counts = add_up(counts, Simulation(seed, groups=groups, states=states).run())
            except SeedFailedError as error:
                failures.append(error)
    return counts, failures


def run_seeds_in_processes(
    seeds: list[int], groups: int, *, states: bool = False
) -> Iterator[Outcome]:
    """Yield the outcomes of pieces, in order."""
    tasks = [seeds[i : i + SEEDS_PER_TASK] for i in range(0, len(seeds), SEEDS_PER_TASK)]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(run_seeds, groups=groups, states=states), tasks)


def add_up(counts: Counter[str], more: Counter[str]) -> Counter[str]:
    """Add counts; of those named "longest" take the maximum."""
    total = counts + more
    for name in total:
        if name.startswith("longest"):
            total[name] = max(counts[name], more[name])
    return total


def kept_seeds() -> list[int]:
    """Return the seeds that once failed: the first word of each line."""
    lines = SEEDS_FILE.read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


def keep(failures: Iterable[SeedFailedError]) -> None:
    """Add failed seeds to the file, one for each reason without its numbers."""
    known = kept_seeds()
    by_reason = {re.sub(r"\d+", "", error.reason): error for error in reversed(list(failures))}
    with SEEDS_FILE.open("a") as text:
        for error in by_reason.values():
            if error.seed not in known:
                text.write(f"{error.seed}  {error.reason.splitlines()[0]}\n")


@contextmanager
def silence() -> Iterator[None]:
    """Silence the loop, which logs every injected fault."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
