"""quire beside other software on this machine, as one table, with the machine's own limits.

  python -m tests.bench [--quick] [--only PART] [--rounds N]
  python -m tests.bench --only serving --peer other=http://127.0.0.1:8080/v1
  python -m tests.bench --only serving --peer-command 'other=server model --port {port}'
  python -m tests.bench --only instruction-sets [--sets avx2,vnni] [--weights 4-bit]

Sides take turns; a figure is the median of the rounds, with the lowest and the highest in brackets.
No prompt is asked twice. Tokens are those of `usage`; the first token is the first text. A target
that is missed is a figure; the exit code says only whether there are figures. Every row names the
instruction set that our side ran with. instruction-sets starts llama-server itself, of every set
that `python -m tests.bench.llama` has built.
"""

import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import metal_ext
from tests.bench.constraints import run_constraints
from tests.bench.front import run_front
from tests.bench.instruction_sets import run_instruction_sets
from tests.bench.limits import read_bandwidth_text
from tests.bench.llama import Builds
from tests.bench.models import KINDS, ModelStore
from tests.bench.options import Options, read_options
from tests.bench.peers import BrokenError
from tests.bench.serving import run_serving
from tests.bench.table import Part, render


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; returns the exit code."""
    options = read_options(arguments, __doc__)
    # What Ctrl-C does ends every server that was started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load = " ".join(f"{average:.2f}" for average in os.getloadavg())
    try:
        machine = _machine(options)
        parts = _run(options)
    except (BrokenError, OSError) as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 1
    rows = [
        row.run_with(options.instruction_set(name))
        for name, part in zip(options.parts, parts, strict=True)
        for row in part.rows
    ]
    facts = [fact for part in parts for fact in part.facts]
    for name, fact in [*machine, ("load average before", load)]:
        print(f"{name:<20} {fact}")
    print(f"\n{render(rows)}", end="\n\n")
    for name, fact in [("prompts", f"--seed {options.seed}"), *facts]:
        print(f"{name:<20} {fact}")
    return 0


def _run(options: Options) -> list[Part]:
    """The parts that were asked for."""
    size, contest, threads = options.size, options.contest, options.threads
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        folder = Path(name)
        parts: dict[str, Callable[[], Part]] = {
            "constraints": lambda: run_constraints(size.constraints, threads, folder),
            "serving": lambda: run_serving(size.serving, size.requests_per_stream, folder, contest),
            "front": lambda: run_front(size.serving, threads, folder),
            "instruction-sets": lambda: run_instruction_sets(
                size.instruction_sets,
                size.sets_work,
                contest,
                ModelStore(options.folder, KINDS[options.model]),
                Builds(options.llama),
                options.sets,
                quantised=options.quantised,
            ),
        }
        return [_timed(part, parts[part]) for part in options.parts]


def _timed(name: str, run: Callable[[], Part]) -> Part:
    started_s = time.monotonic()
    part = run()
    print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return part


def _machine(options: Options) -> list[tuple[str, str]]:
    versions = [f"{name} {version(name)}" for name in ("mlx", "mlx-lm")]
    return [
        ("cores", f"{os.cpu_count()}; threads of all sides: {options.threads}"),
        ("processor", platform.processor() or platform.machine()),
        ("instruction set", metal_ext.instruction_sets()[0]),
        ("read bandwidth", read_bandwidth_text(options.threads)),
        ("software", ", ".join([*versions, f"Python {platform.python_version()}"])),
    ]


if __name__ == "__main__":
    sys.exit(main())
