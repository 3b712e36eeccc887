"""The table of mistakes, how one is put into a source, and what must find it.

A mistake takes the place of an expression that stands once in a function: it is found there however
its lines are wrapped, and wherever the function lies. For each suite a function builds the sources
with the mistake and runs the tests. It returns what found the mistake, and nothing where it
survives. Raises CalledProcessError where the mistake does not build, and TimeoutExpired."""

import ast
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from kvcache.budget import BudgetError
from tests.simulation.faults import SeedFailedError, SimulationError
from tests.simulation.mac import mac_hour
from tests.simulation.seeds import needed_switches, run_seeds
from tests.simulation.switches import as_options

ROOT = Path(__file__).parents[2]
# Parts of a suite that can find a mistake: the first one, where the mistake names none.
PARTS = {
    "core": ("rules", "lives"),
    "kernels": ("small", "asan", "races"),
    "simulation": ("seeds", "mac", "disk"),
}
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class AnchorError(ValueError):
    """The right expression does not stand once in functions of that name."""


@dataclass(frozen=True)
class Mistake:
    """A row of mistakes.toml."""

    suite: str
    file: str
    name: str
    function: str
    right: str
    wrong: str
    by: Sequence[str] = ()

    @property
    def parts(self) -> Sequence[str]:
        assert set(self.by) <= set(PARTS[self.suite]), f"{self.name}: {self.by}"
        return self.by or PARTS[self.suite][:1]

    def plant(self, text: str) -> str:
        """Return the source with the mistake. Raises AnchorError."""
        find = python_functions if self.file.endswith(".py") else native_functions
        places = [
            place
            for start, end in find(text, self.function)
            for place in pattern(self.right).finditer(text, start, end)
        ]
        if len(places) != 1:
            raise AnchorError(
                f"{self.file} has {len(places)} times, not once, in {self.function}: {self.right}"
            )
        return text[: places[0].start()] + self.wrong + text[places[0].end() :]


def read_mistakes() -> list[Mistake]:
    suites = tomllib.loads((Path(__file__).parent / "mistakes.toml").read_text())
    return [
        Mistake(suite, file, name, *row[:3], **dict(*row[3:]))
        for suite, files in suites.items()
        for file, rows in files.items()
        for name, row in rows.items()
    ]


def pattern(expression: str) -> re.Pattern[str]:
    """Match an expression with any white space, and with a comma before a bracket that closes. Of
    ``a.b``, ``a`` alone is no expression."""
    tokens = []
    for token in re.findall(r"\w+|[^\w\s]", expression):
        if token in ")]}":
            tokens.append(rf"(?:,\s*)?\{token}")
        else:
            tokens.append(rf"\b{token}\b" if re.match(r"\w", token) else re.escape(token))
    return re.compile(r"\s*".join(tokens) + r"(?!\.\w|->)")


def python_functions(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yield where functions of that qualified name begin and end."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for part in name.split("."):
        children = [child for node in nodes for child in ast.iter_child_nodes(node)]
        nodes = [node for node in children if isinstance(node, DEFINITION) and node.name == part]
    lines = text.splitlines(keepends=True)
    for node in nodes:
        assert isinstance(node, DEFINITION)
        assert node.end_lineno is not None
        first, end = ("".join(lines[:line]) for line in (node.lineno - 1, node.end_lineno))
        yield len(first), len(end)


def native_functions(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yield where functions of C++ or Metal begin and end, which clang-format has indented."""
    for head in re.finditer(rf"^( {{0,2}})(?:\S.*)?\b{name}\(", text, re.MULTILINE):
        depth, at = 1, head.end()
        while depth:
            depth += (text[at] == "(") - (text[at] == ")")
            at += 1
        # It is in one line; or it ends with the line of a bracket below its first word.
        whole = rf"[\w\s]*[{{:](?:.*\}}$|(?s:.*?)^{head[1]}\}})"
        if body := re.compile(whole, re.MULTILINE).match(text, at):
            yield head.start(), body.end()


LIMIT_S = 1200
# The tests of the core wait for events that a mistake may never let come.
CORE_LIMIT_S = 120
LIVES_PERCENT = 5
# A make for each mistake, beside the one that may have started this.
ENVIRONMENT = {name: value for name, value in os.environ.items() if "MAKE" not in name}
PACKAGES = ("engine", "kvcache")
COPIED = tuple(f"{package}." for package in PACKAGES)
# Every mistake is found by two of these seeds, most within ten; or by two of these hours of a Mac.
SEEDS = 600
HOURS = 5
FOUND_BY = 2
DISK_TESTS = (
    "kvcache/tier/test_tier.py",
    "kvcache/test_hidden_states.py",
    "engine/test_disk.py",
)
# The installed project has a finder that would win against any path.
HUNT = """
import sys
from importlib.machinery import PathFinder
sys.meta_path.insert(0, PathFinder)
from tests.planted.suites import hunt_in_copies
hunt_in_copies()
"""
# A text that others include is tried in one of them.
LIBRARIES = {"rows": "gather", "gate": "products", "multiply": "products"}
# The test that fails, or in which python dies.
TEST = re.compile(r"^(?:_+ |\S+::)(test_\w+)|line \d+ in (test_\w+)", re.MULTILINE)
SANITIZERS = ("ThreadSanitizer: data race", "AddressSanitizer: [a-z-]+", "runtime error: .*")

Done = subprocess.CompletedProcess[str]


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    limit_s: int = LIMIT_S,
    check: bool = False,
    **variables: str,
) -> Done:
    return subprocess.run(
        command,
        cwd=cwd,
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=check,
    )


def try_core(mistake: Mistake, folder: Path) -> str:
    """Build tests/metal/core with one file exchanged, and run it."""
    source = ROOT / mistake.file
    (folder / source.name).write_text(mistake.plant(source.read_text()))
    file = (f"FOLDER={folder}", f"FILE={source.name}")
    run("make", "-C", "tests/metal/core", "faulty", *file, check=True)
    found = [run_core(folder / "tests", part) for part in mistake.parts]
    return "; ".join(found) if all(found) else ""


def run_core(tests: Path, part: str) -> str:
    """part: random lives, or the tests of single rules."""
    name, percent = ("engines live", LIVES_PERCENT) if part == "lives" else ("", 0)
    try:
        done = run(tests, name, "until one fails", limit_s=CORE_LIMIT_S, SEEDS=str(percent))
    except subprocess.TimeoutExpired:
        return "never ends"
    if failed := re.search(r"^FAILED.{11}(.*)", done.stdout, re.MULTILINE):
        return failed[1]
    words = done.stderr.splitlines() or [f"the process ends with {done.returncode}"]
    return words[-1] if done.returncode else ""


def try_kernels(mistake: Mistake, folder: Path) -> str:
    """Build a library of tests/metal/kernels with one file exchanged, and try it."""
    (rung,) = mistake.parts
    stem = Path(mistake.file).stem
    library = LIBRARIES.get(stem, stem)
    text = ROOT / f"build/metal/kernels/{rung}/kernels_{library}.metal"
    (folder / "broken.metal").write_text(mistake.plant(text.read_text()))
    make = ("make", "-C", "tests/metal", "--silent", f"BROKEN={folder}/broken", f"FILE={library}")
    run(*make, f"broken-{rung}", check=True)
    done = run(*make, f"try-{rung}")
    return what_failed(done.stdout + done.stderr) if done.returncode else ""


def what_failed(output: str) -> str:
    for words in SANITIZERS:
        if found := re.search(words, output):
            return found[0]
    test = next((failed or running for failed, running in TEST.findall(output)), "")
    if found := re.search(r"MSL: .*?: (.*)|Fatal Python error: (.*)", output):
        return f"{test}: {found[1] or found[2]}"
    assert test, output
    return test


def try_simulation(mistake: Mistake, folder: Path) -> str:
    """Run the simulator over copies of the packages."""
    copy_packages(folder)
    copied = folder / mistake.file
    copied.write_text(mistake.plant(copied.read_text()))
    found = [start_hunt(folder, part) for part in mistake.parts]
    return "; ".join(found) if all(found) else ""


def hunt_without_mistake(folder: Path) -> str:
    copy_packages(folder)
    return "".join(start_hunt(folder, part, seeds=20) for part in PARTS["simulation"])


def copy_packages(folder: Path) -> None:
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)


def start_hunt(folder: Path, part: str, seeds: int = SEEDS) -> str:
    program = (sys.executable, "-c", HUNT, part, str(seeds))
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = run(*program, cwd=folder, check=True, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
    return done.stdout.strip()


# --- in the process of a hunt, whose working folder has the copies ---------------------------


def hunt(part: str, seeds: int) -> str:
    """Run hours of a Mac, or seeds, until enough of them have failed. Return what was found."""
    if part == "mac":
        reasons = list(islice(filter(None, map(mac_problem, range(HOURS))), FOUND_BY))
        return reasons[0] if len(reasons) == FOUND_BY else ""
    if part == "disk":
        return first_failed(*(ROOT / "tests" / name for name in DISK_TESTS))
    failures: list[SeedFailedError] = []
    for seed in range(seeds):
        failures += run_seeds([seed])[1]
        if len(failures) == FOUND_BY:
            return describe(failures)
    return ""


def first_failed(*files: Path) -> str:
    """Return the test of these files that fails first, if one does."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        pytest.main(["-x", "-rfE", "-p", "no:cacheprovider", *map(str, files)])
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", told.getvalue(), re.MULTILINE)
    return failed[1] if failed else ""


def mac_problem(seed: int) -> str:
    try:
        mac_hour(seed)
    except SeedFailedError as error:
        return error.reason
    except (BudgetError, SimulationError) as error:
        return str(error)
    return ""


def describe(failures: Sequence[SeedFailedError]) -> str:
    numbers = ", ".join(str(error.seed) for error in failures)
    options = as_options(needed_switches(failures[0]))
    return f"seeds {numbers} {options}: {failures[0].reason.splitlines()[0]}"


def hunt_in_copies() -> None:
    """Print what was found. Exits where other files than the copies were run."""
    part, seeds = sys.argv[1:]
    print(hunt(part, int(seeds)))
    copied = [module for name, module in sys.modules.items() if name.startswith(COPIED)]
    strangers = {module.__file__ for module in copied if module.__file__} - {
        str(file) for file in Path.cwd().rglob("*.py")
    }
    if strangers:
        sys.exit(f"not the copies were run: {strangers}")
