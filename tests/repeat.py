"""Run gates, or folders of tests, again and again, so that what fails by chance fails here.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.gates import GATES

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build/repeat"
# A part that takes longer hangs.
RUN_LIMIT_S = 3600.0
# Ends with whoever started it, however that ends.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
HEADINGS = ("part", "failed, alone", "beside a load", "shortest", "median", "longest (s)")


def named(part: str) -> tuple[str, Sequence[str]]:
    """With its command: of a gate, or of pytest for what lies below tests. Raises
    ArgumentTypeError."""
    if part in GATES:
        return part, ("bash", "-c", GATES[part].command)
    if part.startswith("tests/") and (ROOT / part.partition("::")[0]).exists():
        return part, (sys.executable, "-m", "pytest", part)
    raise argparse.ArgumentTypeError(f"{part} is neither below tests nor one of {', '.join(GATES)}")


def row(*cells: str) -> str:
    """A line of the table."""
    return f"{cells[0]:30}" + "".join(f"{cell:>15}" for cell in cells[1:])


def end_children(process: psutil.Process) -> None:
    """Ends all that the process has started, and all that these have."""
    children = process.children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children)


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many busy processes."""
    busy = [sys.executable, "-c", BUSY, str(os.getpid())]
    started = [subprocess.Popen(busy) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def fails(command: Sequence[str], output: Path) -> bool:
    """Run the command; its output is kept where it fails."""
    with output.open("w") as file:
        process = psutil.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            failed = process.wait(RUN_LIMIT_S) != 0
        except psutil.TimeoutExpired:
            end_children(process)
            process.kill()
            process.wait()
            failed = True
    if not failed:
        output.unlink()
    return failed


def repeat(part: str, command: Sequence[str], times: int, busy: int) -> bool:
    """Runs it so many times, the second half beside so many busy processes, and prints its row;
    whether one failed."""
    seconds: list[float] = []
    failures: dict[bool, list[bool]] = {False: [], True: []}  # by whether beside a load
    for number in range(times):
        loaded = number >= (times + 1) // 2
        with load(busy if loaded else 0):
            started = time.monotonic()
            output = OUTPUT / f"{part.replace('/', '-')}-{number + 1}.log"
            failures[loaded].append(fails(command, output))
            seconds.append(time.monotonic() - started)
    counts = (f"{sum(runs)} of {len(runs)}" for runs in failures.values())
    figures = (min(seconds), statistics.median(seconds), max(seconds))
    print(row(part, *counts, *(f"{figure:.1f}" for figure in figures)), flush=True)
    return any(failures[False] + failures[True])


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a run failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__)
    parser.add_argument(
        "parts", nargs="+", type=named, help=f"paths below tests, and of {', '.join(GATES)}"
    )
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    print(row(*HEADINGS), flush=True)
    failed = [repeat(part, command, options.times, options.busy) for part, command in options.parts]
    return int(any(failed))


def interruptible_main() -> int:
    """The same; whatever ends it, nothing that it has started is left."""
    # A shell has its background jobs ignore the first one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        return main()
    finally:
        end_children(psutil.Process())


if __name__ == "__main__":
    sys.exit(interruptible_main())
