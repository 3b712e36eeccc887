"""quire beside other software on this machine, as one table, with the machine's own limits.

  python -m tests.bench [--quick] [--only PART] [--rounds N] [--csv FILE]
  python -m tests.bench --scaling --plot growth.svg
  python -m tests.bench --only serving --peer other=http://127.0.0.1:8080/v1
  python -m tests.bench --only instruction-sets [--sets avx2,vnni] [--weights 4-bit]
  python -m tests.bench --only memory [--tokens N]
  python -m tests.bench --only servers --peer-command \\
    'llama-server=llama-server -m model.gguf --port {port} -t {threads} -np 8 -c 16384 --jinja'

Sides take turns; a figure is the median of the rounds, with the lowest and the highest in brackets.
No prompt is asked twice. Tokens are those of `usage`; the first token is the first text. A part
`servers` makes a model of --model's dimensions below --folder; `python -m tests.bench.gguf` writes
the same weights as GGUF. A target that is missed is a figure; the exit code says only
whether there are figures. Beside a peer that is named llama-server, servers has quire's targets.
Every row names the instruction set that our side ran with. instruction-sets and memory start
llama-server themselves: `python -m tests.bench.llama` builds it for every set.
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
from tests.bench import blas
from tests.bench.agents import run_agents
from tests.bench.attention import run_attention
from tests.bench.constraints import run_constraints
from tests.bench.experts import run_experts
from tests.bench.front import run_front
from tests.bench.instruction_sets import run_instruction_sets
from tests.bench.interference import run_interference
from tests.bench.limits import measure_limits
from tests.bench.llama import Builds
from tests.bench.memory import run_memory
from tests.bench.models import KINDS, ModelStore
from tests.bench.options import Options, read_options
from tests.bench.overhead import run_overhead
from tests.bench.peers import BrokenError
from tests.bench.plot import draw
from tests.bench.prefixes import run_prefixes
from tests.bench.rounds import Part, Rounds
from tests.bench.scaling import run_scaling
from tests.bench.servers import run_servers
from tests.bench.serving import run_serving
from tests.bench.states import run_states
from tests.bench.table import render, write_csv
from tests.bench.three_prompts import run_three_prompts
from tests.bench.twenty_turns import run_twenty_turns


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; returns the exit code."""
    options = read_options(arguments, __doc__)
    # What Ctrl-C does ends every server that was started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load = " ".join(f"{average:.2f}" for average in os.getloadavg())
    try:
        machine = _machine(options)
        found = _run(options)
    except (BrokenError, OSError) as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 1
    rows = [
        row.run_with(options.instruction_set(name))
        for name, part in zip(options.parts, found, strict=True)
        for row in part.rows
    ]
    facts = [fact for part in found for fact in part.facts]
    for name, fact in [*machine, ("load average before", load)]:
        print(f"{name:<20} {fact}")
    print(f"\n{render(rows)}", end="\n\n")
    for name, fact in [("prompts", f"--seed {options.seed}"), *facts]:
        print(f"{name:<20} {fact}")
    if options.csv is not None:
        write_csv(options.csv, rows)
    if options.plot is not None:
        draw([curve for part in found for curve in part.curves], options.plot)
    return 0


def _run(options: Options) -> list[Part]:
    """The parts that were asked for."""
    size, contest, threads = options.size, options.contest, options.threads
    store = ModelStore(options.folder, KINDS[options.model])
    builds = Builds(options.llama)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as name:
        folder = Path(name)
        parts: dict[str, Callable[[], Part]] = {
            "attention": lambda: run_attention(size.decode, size.chunk, threads),
            "overhead": lambda: run_overhead(size.overhead, threads, folder),
            "constraints": lambda: run_constraints(size.constraints, threads, folder),
            "serving": lambda: run_serving(size.serving, size.requests_per_stream, folder, contest),
            "interference": lambda: run_interference(size.interference, threads, folder),
            "prefixes": lambda: run_prefixes(size.prefixes, threads, folder),
            "agents": lambda: run_agents(size.agents, threads, folder),
            "three-prompts": lambda: run_three_prompts(
                size.three_prompts,
                size.three_prompts_peer if contest.with_mlx_lm else Rounds(0, 0),
                threads,
                folder,
            ),
            "experts": lambda: run_experts(size.decode, threads),
            "front": lambda: run_front(size.serving, threads, folder),
            "servers": lambda: run_servers(
                size.servers, 1, contest, store, quantised=options.quantised
            ),
            "instruction-sets": lambda: run_instruction_sets(
                size.instruction_sets,
                size.sets_work,
                contest,
                store,
                builds,
                options.sets,
                quantised=options.quantised,
            ),
            "memory": lambda: run_memory(
                size.memory,
                options.tokens or size.memory_tokens,
                contest,
                options.folder,
                builds.programs,
            ),
            "states": lambda: run_states(size.decode, contest, options.folder),
            "turns": lambda: run_twenty_turns(size.turns, contest, store),
            "scaling": lambda: run_scaling(size.scaling, size.requests_per_stream, folder, contest),
        }
        return [_timed(part, parts[part]) for part in options.parts]


def _timed(name: str, run: Callable[[], Part]) -> Part:
    started_s = time.monotonic()
    found = run()
    print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return found


def _machine(options: Options) -> list[tuple[str, str]]:
    multiplies = "MLX brings its own" if blas.calls() is None else "OpenBLAS"
    versions = [f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "numpy")]
    return [
        ("cores", f"{os.cpu_count()}; threads of all sides: {options.threads}"),
        ("processor", platform.processor() or platform.machine()),
        ("instruction set", metal_ext.instruction_sets()[0]),
        *measure_limits(options.threads, options.size.limit_passes).facts(),
        ("float32 products", f"{multiplies}, mlx_lm.server's too"),
        ("software", ", ".join([*versions, f"Python {platform.python_version()}"])),
    ]


if __name__ == "__main__":
    blas.restart_with_it(read_options(None, __doc__).threads)
    sys.exit(main())
