"""Run gates, or folders of tests, again and again: a failure by chance shows itself here.

The second half of a part's runs has busy processes beside it, by default one per processor. The
output of failed runs stays in build/repeat.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests import gates
from tests.gates import GATES, POLL_S, PYTHON, ROOT, Gate, Run

OUTPUT = ROOT / "build/repeat"
# A part that takes longer hangs.
LIMIT_MIN = 60
# It ends with its starter, however that ends.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
HEADINGS = ("part", "failed, alone", "beside a load", "shortest", "median", "longest (s)")


def read_part(text: str) -> Gate:
    """Return a gate by its name, or pytest as one for a path below tests. Raises
    ArgumentTypeError."""
    if text in GATES:
        return Gate(text, GATES[text].command, limit_min=LIMIT_MIN)
    if text.startswith("tests/") and (ROOT / text.partition("::")[0]).exists():
        return Gate(text.replace("/", "-"), f"{PYTHON} pytest '{text}'", limit_min=LIMIT_MIN)
    raise argparse.ArgumentTypeError(f"{text} is neither below tests nor one of {', '.join(GATES)}")


def row(*cells: str) -> str:
    return f"{cells[0]:30}" + "".join(f"{cell:>15}" for cell in cells[1:])


@contextmanager
def load(processes: int) -> Iterator[None]:
    busy = [sys.executable, "-c", BUSY, str(os.getpid())]
    started = [subprocess.Popen(busy) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def fails(gate: Gate, number: int) -> bool:
    """Run the part; keep its output where it fails."""
    run = Run(gate)
    try:
        while not run.has_ended():
            time.sleep(POLL_S)
    except BaseException:
        run.kill()
        raise
    if run.passed:
        run.log.unlink()
    else:
        run.log.rename(OUTPUT / f"{gate.name}-{number}.log")
    return not run.passed


def repeat(gate: Gate, times: int, busy: int) -> bool:
    """Print the part's row; return whether a run failed. busy: processes of the second half."""
    seconds: list[float] = []
    failures: dict[bool, list[bool]] = {False: [], True: []}  # by whether beside a load
    for number in range(times):
        loaded = number >= (times + 1) // 2
        with load(busy if loaded else 0):
            started = time.monotonic()
            failures[loaded].append(fails(gate, number + 1))
            seconds.append(time.monotonic() - started)
    counts = (f"{sum(runs)} of {len(runs)}" for runs in failures.values())
    figures = (min(seconds), statistics.median(seconds), max(seconds))
    print(row(gate.name, *counts, *(f"{figure:.1f}" for figure in figures)), flush=True)
    return any(failures[False] + failures[True])


def main() -> int:
    """1 when a run failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__)
    known = f"paths below tests, and of {', '.join(GATES)}"
    parser.add_argument("parts", nargs="+", type=read_part, help=known)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    # A shell has its background jobs ignore the first one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    gates.LOGS = OUTPUT
    print(row(*HEADINGS), flush=True)
    failed = [repeat(part, options.times, options.busy) for part in options.parts]
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
