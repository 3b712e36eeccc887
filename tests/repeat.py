"""Runs parts of the gates again and again, so that what fails by chance fails here.

The second half of a part's runs has busy processes beside it, by default one per processor. What
failed runs said stays in build/repeat. With --coverage it fails, too, where a line or a branch of
the product was missed in some rounds of all parts only: that `make test` covers it is by chance.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from coverage import Coverage

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build/repeat"
COVERAGE = OUTPUT / "coverage"
MEASURED = ("-m", "coverage", "run", "--parallel-mode")
# What .ci/run runs beside `make test`. All of it can be run again where it stands.
GATES = {
    "native": "make native",
    "metal-lint": "make metal-lint",
    "metal-core": "make metal-core PLANTED='today/5'",
    "metal-cross": "make metal-cross",
    "metal-kernels": "make metal-kernels PLANTED='today/5'",
    "metal-graph": "make metal-graph",
    "metal-darwin": "make metal-darwin",
    "clients": "make clients",
    "soak": "make soak SOAK='--requests 400'",
    "abuse": "make abuse ABUSE='--minutes 1'",
    "fuzz": "make fuzz",
    "swaps": "make swaps SWAPS='--swaps 12'",
    "arm64": "make arm64",
    "page": "make page",
    "simulate": "make simulate SIM='--seeds 1000'",
    "docker": "make docker",
    "bench-constraints": "make bench BENCH='--quick --only constraints'",
    "bench-serving": "make bench BENCH='--quick --only serving'",
    "cluster": "make cluster CLUSTER='--ours'",
}
# Of the folders with tests, `make test` leaves one to `make clients`.
LEFT_OUT = "tests/clients"
# A part that takes longer hangs.
RUN_LIMIT_S = 3600.0
# Ends with whoever started it, however that ends.
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
HEADINGS = ("part", "failed, alone", "beside a load", "shortest", "median", "longest (s)")


def parts_of_make_test() -> list[str]:
    """What `make test` leaves to pytest, by folder."""
    files = (path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    return sorted({"/".join(path.parts[:2]) for path in files} - {LEFT_OUT})


def named(part: str) -> tuple[str, Sequence[str]]:
    """With its command: of a gate, or of pytest for what lies below tests. Raises
    ArgumentTypeError."""
    if part in GATES:
        return part, shlex.split(GATES[part])
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


def fails(command: Sequence[str], output: Path, measured: Path) -> bool:
    """Runs it; what it says is kept where it fails. measured: where coverage is kept."""
    env = os.environ | {"COVERAGE_FILE": str(measured)}
    with output.open("w") as file:
        process = psutil.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=env)
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
            measured = COVERAGE / str(number + 1) / output.stem
            failures[loaded].append(fails(command, output, measured))
            seconds.append(time.monotonic() - started)
    counts = (f"{sum(runs)} of {len(runs)}" for runs in failures.values())
    figures = (min(seconds), statistics.median(seconds), max(seconds))
    print(row(part, *counts, *(f"{figure:.1f}" for figure in figures)), flush=True)
    return any(failures[False] + failures[True])


def missed(measured: Path) -> set[str]:
    """The lines and branches that a round of all parts has not covered, each as a person reads
    it."""
    whole = Coverage(str(measured / "whole"), config_file=str(ROOT / "pyproject.toml"))
    whole.combine([str(path) for path in measured.iterdir()], strict=True, keep=True)
    report = measured / "report.json"
    whole.json_report(outfile=str(report))
    found = set()
    for file, its in json.loads(report.read_text())["files"].items():
        found |= {f"{file}:{line}" for line in its["missing_lines"]}
        found |= {f"{file}:{line} -> {then}" for line, then in its["missing_branches"]}
    return found


def missed_by_chance() -> bool:
    """Prints what was missed in some rounds only; whether there is something."""
    rounds = [missed(measured) for measured in COVERAGE.iterdir()]
    times = Counter(place for one in rounds for place in one)
    some = sorted(place for place in times if times[place] < len(rounds))
    for place in some:
        print(f"{place} was missed in {times[place]} of {len(rounds)} rounds", flush=True)
    return bool(some)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a run failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.repeat", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        type=named,
        default=[named(part) for part in parts_of_make_test()],
        help=f"paths below tests, all by default, and of {', '.join(GATES)}",
    )
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--coverage", action="store_true", help="of the product, too")
    options = parser.parse_args(arguments)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(COVERAGE, ignore_errors=True)
    print(row(*HEADINGS), flush=True)
    times, busy = options.times, options.busy
    for number in range(times if options.coverage else 0):
        (COVERAGE / str(number + 1)).mkdir(parents=True)
    failed = []
    for part, command in options.parts:
        if options.coverage and command[0] == sys.executable:
            command = (sys.executable, *MEASURED, *command[1:])
        failed.append(repeat(part, command, times, busy))
    by_chance = options.coverage and missed_by_chance()
    return int(any(failed) or by_chance)


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
