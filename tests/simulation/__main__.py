"""Runs many seeds: ``python -m tests.simulation [--seeds N] [--seed N] [--groups N] [--states]``.

A seed is the life of an engine. One that fails is printed with the steps that led to it, and added
to seeds.txt, whose seeds are run every time.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence

from tests.simulation.faults import SeedFailedError
from tests.simulation.seeds import add_up, keep, kept_seeds, run_seeds_in_processes, silence
from tests.simulation.simulator import Simulation

MOST_SHOWN = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, help="only this one, step by step")
    parser.add_argument("--groups", type=int, default=1, help="kinds of layers of the model")
    parser.add_argument("--states", action="store_true", help="and recurrent layers")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        return _run_one(asked.seed, asked.groups, asked.states)
    seeds = [*kept_seeds(), *range(asked.seeds)]
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    failures: list[SeedFailedError] = []
    for more, failed in run_seeds_in_processes(seeds, asked.groups, states=asked.states):
        counts = add_up(counts, more)
        for error in failed:
            failures.append(error)
            if len(failures) <= MOST_SHOWN:
                print(f"{error}\n", flush=True)
    seconds = time.perf_counter() - started
    keep(failures)
    _print(counts)
    print(f"{len(seeds)} seeds in {seconds:.1f} s: {len(seeds) / seconds:.1f} per second")
    print(f"failed: {sorted(error.seed for error in failures) or 'none'}")
    return 1 if failures else 0


def _run_one(seed: int, groups: int, states: bool) -> int:
    simulation = Simulation(seed, trace_lines=None, groups=groups, states=states)
    print(simulation.world)
    try:
        with silence():
            counts = simulation.run()
    except SeedFailedError as error:
        print(error)
        traceback.print_exception(error.__cause__)
        return 1
    print(*simulation.trace, sep="\n")
    _print(counts)
    return 0


def _print(counts: Counter[str]) -> None:
    for name, count in sorted(counts.items()):
        print(f"{count:12,}  {name}")


if __name__ == "__main__":
    sys.exit(main())
