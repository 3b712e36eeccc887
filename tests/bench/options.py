"""What a run of the benchmark can be told."""

import argparse
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

import metal_ext
from engine.machine import machine_threads
from tests.bench.contest import Contest
from tests.bench.llama import FLAGS
from tests.bench.models import KINDS
from tests.bench.peers import Remote
from tests.bench.plot import FORMATS
from tests.bench.programs import Command
from tests.bench.sizes import FULL, QUICK, Size

# What `make bench` runs. The others take a large model, or long, and are asked for by name.
DEFAULT_PARTS = (
    "attention",
    "overhead",
    "constraints",
    "serving",
    "interference",
    "prefixes",
    "agents",
    "three-prompts",
)
PARTS = (
    *DEFAULT_PARTS,
    "experts",
    "front",
    "servers",
    "instruction-sets",
    "memory",
    "states",
    "turns",
    "scaling",
)
# Where --ours may be a server of another machine.
PARTS_AT_URLS = ("serving", "servers", "turns", "scaling")
SEEDS = 10**9
Parsed = TypeVar("Parsed")
# Far apart, so that no run meets another one's prompts by counting up.
SEED_STRIDE = 10**6


@dataclass(frozen=True, slots=True)
class Options:
    """As they were given."""

    parts: tuple[str, ...]
    size: Size
    contest: Contest
    seed: int
    folder: Path
    model: str
    """Of servers, by its name."""
    quantised: bool
    sets: tuple[str, ...]
    """Instruction sets, by their names; none: all."""
    llama: Path
    tokens: int | None
    """Of the conversation in memory."""
    csv: Path | None
    plot: Path | None

    @property
    def threads(self) -> int:
        """Of all sides."""
        return self.contest.threads

    def instruction_set(self, part: str) -> str:
        """What our side of a part runs with, where its rows do not say: what it chooses itself."""
        elsewhere = self.contest.ours_url is not None and part in PARTS_AT_URLS
        return "not known" if elsewhere else metal_ext.instruction_sets()[0]


def read_options(arguments: Sequence[str] | None, description: str | None) -> Options:
    """Ends the program, as argparse does, when they make no sense."""
    parser = _parser(description)
    asked = parser.parse_args(arguments)
    parts = set(asked.only or ([] if asked.scaling else DEFAULT_PARTS))
    parts |= {"scaling"} if asked.scaling else set()
    if asked.plot is not None and "scaling" not in parts:
        parser.error("--plot draws what --scaling measures")
    size: Size = QUICK if asked.quick else FULL
    seed: int = secrets.randbelow(SEEDS) if asked.seed is None else asked.seed
    contest = Contest(
        asked.threads,
        count(SEED_STRIDE * (seed + 1)),
        asked.ours,
        tuple(asked.peer),
        tuple(asked.peer_command),
        not asked.skip_mlx_lm,
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
        asked.llama or asked.folder / "llama",
        asked.tokens,
        asked.csv,
        asked.plot,
    )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer rounds: a few minutes")
    add("--only", choices=PARTS, action="append", help="one part of the table; may be repeated")
    add("--scaling", action="store_true", help="streams, prompts and cached blocks; same as --only")
    add("--rounds", type=_at_least_one, metavar="N", help="of everything, however long they take")
    add(
        "--threads", type=_at_least_one, default=machine_threads(), metavar="N", help="of all sides"
    )
    add("--csv", type=Path, metavar="FILE", help="write the rows there too")
    add("--plot", type=_picture, metavar="FILE", help=f"draw --scaling: {', '.join(FORMATS)}")
    servers = parser.add_argument_group("servers, in serving, servers, turns and scaling")
    add = servers.add_argument
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
    add("--skip-mlx-lm", action="store_true", help="no mlx_lm.server as a peer")
    add("--seed", type=int, metavar="N", help="of the prompts; otherwise they are new in every run")
    add(
        "--model",
        choices=KINDS,
        default=next(iter(KINDS)),
        help="whose dimensions, in servers, instruction-sets and turns",
    )
    add(
        "--weights",
        choices=("bfloat16", "4-bit"),
        default="bfloat16",
        help="ours, in servers, and of both sides in instruction-sets",
    )
    add(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "quire-bench",
        help="where the models of servers are made once and kept, 18 GB (default: %(default)s)",
    )
    _add_built_servers(parser)
    return parser


def _add_built_servers(parser: argparse.ArgumentParser) -> None:
    """What the parts take that start a llama-server themselves."""
    built = parser.add_argument_group("llama-server of python -m tests.bench.llama")
    add = built.add_argument
    add(
        "--sets",
        type=_checked(_sets),
        action="append",
        default=[],
        metavar="NAMES",
        help="in instruction-sets: some of them, with commas; otherwise all of this processor",
    )
    add("--llama", type=Path, metavar="FOLDER", help="where it is (default: llama below --folder)")
    add(
        "--tokens",
        type=_at_least_one,
        metavar="N",
        help="of the conversation in memory (default: 32768)",
    )


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


def _picture(text: str) -> Path:
    file = Path(text)
    if file.suffix not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {', '.join(FORMATS)}")
    return file


def _url(text: str) -> str:
    return _checked(Remote.parse)(f"ours={text}")[1]


def _checked(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """The parser's own words about what is wrong."""

    def checked(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked
