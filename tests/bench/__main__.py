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

import argparse
import math
import os
import platform
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import metal_ext
from engine.machine import machine_threads
from tests.bench.constraints import run_constraints
from tests.bench.instruction_sets import SetsWork, run_instruction_sets
from tests.bench.limits import read_bandwidth_text
from tests.bench.llama import FLAGS, Builds
from tests.bench.models import KINDS, ModelStore
from tests.bench.peers import BrokenError, Command, Contest, Remote
from tests.bench.serving import run_front, run_serving
from tests.bench.table import Part, Rounds, render

# Parts of `make bench`. The last one takes a large model and long, and only runs by its name.
DEFAULT_PARTS = ("constraints", "serving", "front")
PARTS = (*DEFAULT_PARTS, "instruction-sets")
SEEDS = 10**9
# Far apart, so that no run meets another one's prompts by counting up.
SEED_STRIDE = 10**6
Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Size:
    """The rounds of every part, and the work of a round."""

    constraints: Rounds
    serving: Rounds
    """And of front."""
    requests_per_stream: int
    instruction_sets: Rounds
    sets_work: SetsWork

    def with_rounds(self, most: int) -> "Size":
        """Return the same size with another number of rounds of every part, without a time
        limit."""
        changed: dict[str, Any] = {
            field.name: Rounds(most, math.inf)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Rounds)
        }
        return replace(self, **changed)


QUICK = Size(
    constraints=Rounds(3, 15),
    serving=Rounds(3, 25),
    requests_per_stream=2,
    instruction_sets=Rounds(1, 60),
    sets_work=SetsWork((252,), (8,), (4,)),
)
FULL = Size(
    constraints=Rounds(9, 90),
    serving=Rounds(15, 240),
    requests_per_stream=4,
    instruction_sets=Rounds(3, 7200),
    sets_work=SetsWork((252, 2048), (2, 4, 8), (1, 4, 8)),
)


@dataclass(frozen=True, slots=True)
class Options:
    parts: tuple[str, ...]
    size: Size
    contest: Contest
    seed: int
    folder: Path
    model: str
    quantised: bool
    sets: tuple[str, ...]
    """Instruction sets, by their names; none: all."""

    @property
    def threads(self) -> int:
        return self.contest.threads

    def instruction_set(self, part: str) -> str:
        """Return the set that our side of a part runs with by its own choice."""
        elsewhere = self.contest.ours_url is not None and part == "serving"
        return "not known" if elsewhere else metal_ext.instruction_sets()[0]


def read_options(arguments: Sequence[str] | None, description: str | None) -> Options:
    """Parse the command line; end the program with a message where it makes no sense."""
    asked = _parser(description).parse_args(arguments)
    parts = asked.only or DEFAULT_PARTS
    size = QUICK if asked.quick else FULL
    seed = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed
    contest = Contest(
        asked.threads,
        count(SEED_STRIDE * (seed + 1)),
        asked.ours,
        tuple(asked.peer),
        tuple(asked.peer_command),
    )
    return Options(
        tuple(part for part in PARTS if part in parts),
        size if asked.rounds is None else size.with_rounds(asked.rounds),
        contest,
        seed,
        asked.folder,
        asked.model,
        asked.weights == "4-bit",
        tuple(name for names in asked.sets for name in names),
    )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder = Path(tempfile.gettempdir()) / "quire-bench"
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer rounds: a few minutes")
    add("--only", choices=PARTS, action="append", help="one part of the table; may be repeated")
    add("--rounds", type=_at_least_one, metavar="N", help="of all parts, however long they take")
    add("--threads", type=_at_least_one, default=machine_threads(), help="of all sides")
    add("--seed", type=int, metavar="N", help="of the prompts; otherwise they are new in every run")
    add = parser.add_argument_group("serving").add_argument
    add("--ours", type=_url, metavar="URL", help="a quire that runs already, at its base URL")
    add(
        "--peer",
        type=_checked(Remote.parse),
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that runs already, at its OpenAI base URL; may be repeated",
    )
    add(
        "--peer-command",
        type=_checked(Command.parse),
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="a server to start and end, {port} and {threads} in its command; may be repeated",
    )
    add = parser.add_argument_group("instruction-sets").add_argument
    add("--model", choices=KINDS, default=next(iter(KINDS)), help="whose dimensions")
    add("--weights", choices=("bfloat16", "4-bit"), default="bfloat16", help="of both sides")
    add(
        "--folder",
        type=Path,
        default=folder,
        help="where models are made once and kept, 18 GB (default: %(default)s)",
    )
    add(
        "--sets",
        type=_checked(_sets),
        action="append",
        default=[],
        metavar="NAMES",
        help="some of them, with commas; otherwise all of this processor",
    )
    return parser


def _sets(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in FLAGS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: only {', '.join(FLAGS)} are known")
    return names


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1")
    return number


def _url(text: str) -> str:
    return _checked(Remote.parse)(f"ours={text}")[1]


def _checked(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """Turn a parser's ValueError into argparse's own error."""

    def checked(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments, __doc__)
    # As Ctrl-C: it ends every server that was started.
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
                Builds(options.folder / "llama"),
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
