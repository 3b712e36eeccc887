"""Runs lists of seeds, and looks for the switches that make one fail."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

from tests.simulation.faults import SeedFailedError
from tests.simulation.simulator import Simulation
from tests.simulation.switches import Settings, as_options, draw_settings, smallest

SEEDS_PER_TASK = 50
PROCESSES = 2

Outcome = tuple[Counter[str], list[SeedFailedError]]


def run_seeds(seeds: Iterable[int], forced: Settings | None = None) -> Outcome:
    """Run seeds one after the other; return counts of events, and failures. forced: switches that
    no seed draws."""
    counts: Counter[str] = Counter()
    failures = []
    with silence():
        for seed in seeds:
            try:
                simulation = Simulation(seed, {**draw_settings(seed), **(forced or {})})
                counts = add_up(counts, simulation.run())
            except SeedFailedError as error:
                failures.append(error)
    return counts, failures


def run_seeds_in_processes(seeds: range, forced: Settings) -> Iterator[Outcome]:
    """Yield the outcomes of pieces, in order."""
    tasks = [seeds[i : i + SEEDS_PER_TASK] for i in range(0, len(seeds), SEEDS_PER_TASK)]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(run_seeds, forced=forced), tasks)


def needed_switches(error: SeedFailedError) -> Settings:
    """Return the least that must be turned on for the seed to fail."""

    def fails(settings: Settings) -> bool:
        return bool(run_seeds([error.seed], settings)[1])

    return smallest(error.settings, fails)


def explain(error: SeedFailedError) -> str:
    """Return what failed, and the command that shows it with the fewest switches."""
    options = as_options(needed_switches(error))
    return f"{error}\nagain: python -m tests.simulation --seed {error.seed} --only {options}"


def add_up(counts: Counter[str], more: Counter[str]) -> Counter[str]:
    """Add counts; of those named "longest" take the maximum."""
    total = counts + more
    for name in total:
        if name.startswith("longest"):
            total[name] = max(counts[name], more[name])
    return total


@contextmanager
def silence() -> Iterator[None]:
    """Silence the loop, which logs every injected fault."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
