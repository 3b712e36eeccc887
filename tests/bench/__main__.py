"""One table, and the machine's facts: ``python -m tests.bench [--quick] [--only PART] ...``.

A target that is missed is a figure; the exit code says only whether there are figures.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import metal_ext
from engine.machine import machine_threads
from tests.bench.agents import run_agents
from tests.bench.attention import read_bandwidth, run_attention
from tests.bench.constraints import run_constraints
from tests.bench.interference import run_interference
from tests.bench.overhead import run_overhead
from tests.bench.peers import BrokenError
from tests.bench.prefixes import run_prefixes
from tests.bench.rounds import Part, Rounds
from tests.bench.serving import run_serving
from tests.bench.table import render, write_csv

PARTS = ("attention", "overhead", "constraints", "serving", "interference", "prefixes", "agents")
READ_PASSES = 10


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    decode: Rounds
    chunk: Rounds
    overhead: Rounds
    constraints: Rounds
    serving: Rounds
    requests_per_stream: int
    interference: Rounds
    prefixes: Rounds
    agents: Rounds


QUICK = Size(
    decode=Rounds(5, 10),
    chunk=Rounds(3, 8),
    overhead=Rounds(1, 30),
    constraints=Rounds(3, 15),
    serving=Rounds(3, 25),
    requests_per_stream=2,
    interference=Rounds(2, 15),
    prefixes=Rounds(3, 10),
    agents=Rounds(1, 15),
)
FULL = Size(
    decode=Rounds(25, 60),
    chunk=Rounds(7, 60),
    overhead=Rounds(5, 200),
    constraints=Rounds(9, 90),
    serving=Rounds(15, 240),
    requests_per_stream=4,
    interference=Rounds(7, 180),
    prefixes=Rounds(15, 180),
    agents=Rounds(5, 180),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a few minutes")
    parser.add_argument("--only", choices=PARTS, help="one part of the table")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--threads", type=int, default=machine_threads(), help="of all sides")
    asked = parser.parse_args(arguments)
    load = " ".join(f"{average:.2f}" for average in os.getloadavg())
    try:
        found = _run(QUICK if asked.quick else FULL, asked.only, asked.threads)
    except (BrokenError, OSError) as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 1
    rows = [row for part in found for row in part.rows]
    facts = [fact for part in found for fact in part.facts]
    print(render(rows), end="\n\n")
    for name, fact in [*_machine(asked.threads), ("load average before", load), *facts]:
        print(f"{name:<21}{fact}")
    if asked.csv is not None:
        write_csv(asked.csv, rows)
    return 0


def _run(size: Size, only: str | None, threads: int) -> list[Part]:
    """The parts that were asked for, in the order of PARTS."""
    if metal_ext.fast_blas is not None:
        metal_ext.fast_blas.use(metal_ext.CpuWorkers(threads))
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        folder = Path(name)
        parts: dict[str, Callable[[], Part]] = {
            "attention": lambda: run_attention(size.decode, size.chunk, threads),
            "overhead": lambda: run_overhead(size.overhead, threads, folder),
            "constraints": lambda: run_constraints(size.constraints, threads, folder),
            "serving": lambda: run_serving(size.serving, size.requests_per_stream, threads, folder),
            "interference": lambda: run_interference(size.interference, threads, folder),
            "prefixes": lambda: run_prefixes(size.prefixes, threads, folder),
            "agents": lambda: run_agents(size.agents, threads, folder),
        }
        return [_timed(part, parts[part]) for part in PARTS if only in (None, part)]


def _timed(name: str, run: Callable[[], Part]) -> Part:
    started_s = time.monotonic()
    found = run()
    print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return found


def _machine(threads: int) -> list[tuple[str, str]]:
    blas = metal_ext.fast_blas
    gb_per_s = read_bandwidth(metal_ext.CpuWorkers(threads), READ_PASSES) / 1e9
    versions = [f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "numpy")]
    return [
        ("cores", f"{os.cpu_count()}; threads of all sides: {threads}"),
        ("processor", platform.processor() or platform.machine()),
        ("instruction set", metal_ext.instruction_sets()[0]),
        ("read bandwidth", f"{gb_per_s:.1f} GB/s, best of {READ_PASSES} passes"),
        ("float32 products", f"{blas.name if blas else 'MLX brings its own'}, all sides"),
        ("software", ", ".join([*versions, f"Python {platform.python_version()}"])),
    ]


if __name__ == "__main__":
    sys.exit(main())
