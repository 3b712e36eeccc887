"""Runs many seeds: ``python -m tests.simulation [--seeds N | --seed N] [--only] [--SWITCH ...]``.

A seed is the life of an engine, and draws its switches (switches.py). ``--states`` turns one on for
all seeds, ``--groups 1`` gives it a value. A seed that fails is printed with the steps that led to
it, its switches, and the fewest of them with which it fails.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import partial

from tests.simulation.faults import SeedFailedError
from tests.simulation.seeds import add_up, explain, run_seeds_in_processes, silence
from tests.simulation.simulator import Simulation
from tests.simulation.switches import OFF, SWITCHES, Settings, draw_settings, parse

MOST_SHOWN = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, help="only this one, step by step")
    parser.add_argument("--only", action="store_true", help="all switches off but those given")
    for switch in SWITCHES:
        kind, most = partial(parse, switch), switch.values[-1]
        parser.add_argument(f"--{switch.name}", type=kind, nargs="?", const=most, dest=switch.name)
    options = vars(parser.parse_args(arguments))
    forced = {name: options[name] for name in OFF if options[name] is not None}
    if options["only"]:
        forced = {**OFF, **forced}
    if options["seed"] is not None:
        return _run_one(options["seed"], forced)
    return _run_many(range(options["seeds"]), forced)


def _run_many(seeds: range, forced: Settings) -> int:
    started = time.perf_counter()
    counts: Counter[str] = Counter()
    failures: list[SeedFailedError] = []
    for more, failed in run_seeds_in_processes(seeds, forced):
        counts = add_up(counts, more)
        for error in failed:
            failures.append(error)
            if len(failures) <= MOST_SHOWN:
                print(f"{explain(error)}\n", flush=True)
    seconds = time.perf_counter() - started
    _print(counts)
    print(f"{len(seeds)} seeds in {seconds:.1f} s: {len(seeds) / seconds:.1f} per second")
    print(f"failed: {sorted(error.seed for error in failures) or 'none'}")
    return 1 if failures else 0


def _run_one(seed: int, forced: Settings) -> int:
    simulation = Simulation(seed, {**draw_settings(seed), **forced}, trace_lines=None)
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
