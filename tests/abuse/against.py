"""Runs the tests of defects on another checkout's product: there they must fail.

The tests are ours. What they build on that imports the product (fixtures, harnesses) is the other
checkout's own where it has it, because it fits that code; where a test then finds something
missing, it is tried once more with all of ours. One process of pytest per test: what hangs, or
takes the machine's memory, is ended, and has failed.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil

from tests.abuse.tables import TESTS

TIME_LIMIT_S = 240.0
MEMORY_LIMIT_BYTES = 6 * 2**30
POLL_S = 0.1
TOLD_CHARS = 150
# What a test says of code that has not got what it asks for at all.
LACKS = re.compile(
    r"ImportError|ModuleNotFoundError|AttributeError|NameError|fixture '|"
    r"TypeError: .* (argument|positional)|"
    r"pydantic_core\S*ValidationError: .* for (\w+Section|Config)"
)
PRODUCT = re.compile(r"^(from|import) (server|engine|kvcache|metal_ext)\b", re.MULTILINE)
PLUGIN = "tests.abuse.stand_ins"


class Outcome(Enum):
    """Of a test on some checkout."""

    PASSES = "passes"
    FAILS = "fails"
    LACKS = "lacks"
    """It fails, because what it asks for is not there."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a test ended, and the first thing that it said of why."""

    outcome: Outcome
    why: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where tests are run: a folder that has tests/, and the Python of the product."""

    folder: Path
    python: Path

    def run(self, test: str) -> Run:
        """test: below tests/."""
        pytest = f"-m pytest -x --tb=short -p no:cacheprovider -p {PLUGIN} -o addopts="
        # Ended from outside: pytest's own limit does not end what holds the interpreter.
        return ended(
            [self.python, *pytest.split(), "-o", "timeout=0", f"tests/{test}"], self.folder
        )


def ended(
    command: Sequence[str | Path],
    folder: Path,
    time_limit_s: float = TIME_LIMIT_S,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
) -> Run:
    """Runs pytest to its end, or ends it and all that it has started."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, cwd=folder, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline_s = time.monotonic() + time_limit_s
            while process.poll() is None:
                if time.monotonic() > deadline_s:
                    return Run(Outcome.FAILS, f"does not end within {time_limit_s:.0f} s")
                if resident_bytes(process.pid) > memory_limit_bytes:
                    gib = memory_limit_bytes / 2**30
                    return Run(Outcome.FAILS, f"takes more than {gib:.0f} GiB")
                time.sleep(POLL_S)
        finally:
            end_all(process)
        said.seek(0)
        return judged(process.returncode, said.read().decode(errors="replace"))


def judged(code: int, said: str) -> Run:
    """What pytest's exit code and output say of its one test."""
    if code == 0:
        return Run(Outcome.PASSES)
    errors = [line[1:].strip() for line in said.splitlines() if line.startswith("E ")]
    why = "; ".join(errors[:2]) or f"pytest ended with {code}"
    # 2 and more: a test could not be read, or is not there.
    return Run(Outcome.LACKS if code > 1 or LACKS.match(why) else Outcome.FAILS, why[:TOLD_CHARS])


def resident_bytes(pid: int) -> int:
    """Of a process with its children."""
    total = 0
    try:
        root = psutil.Process(pid)
        for one in (root, *root.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and what it has started."""
    try:
        root = psutil.Process(process.pid)
        for one in (*root.children(recursive=True), root):
            one.kill()
    except psutil.NoSuchProcess:
        pass
    process.wait()


@contextmanager
def places(checkout: Path) -> Iterator[list[Place]]:
    """The other product under our tests: with what its own tests build on, and with all of ours."""
    python = checkout / ".venv" / "bin" / "python"
    assert python.exists(), f"{checkout} has not been built: there is no {python}"
    unneeded = shutil.ignore_patterns(".*", "build", "__pycache__")
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for name in ("theirs", "ours"):
            place = Path(folder) / name
            shutil.copytree(checkout, place, ignore=unneeded)
            shutil.copytree(TESTS, place / "tests", ignore=unneeded, dirs_exist_ok=True)
            if name == "theirs":
                theirs = place / "tests"
                shutil.copytree(checkout / "tests", theirs, ignore=but_support, dirs_exist_ok=True)
            made.append(Place(place, python))
        yield made


def but_support(folder: str, names: list[str]) -> set[str]:
    """Names of files that are tests, or that tests of any product can build on."""
    files = [name for name in names if not (Path(folder) / name).is_dir()]
    return {
        name
        for name in files
        if re.match(r"test_|(?!.*\.py$)", name)
        or not PRODUCT.search((Path(folder) / name).read_text(encoding="utf-8"))
    } | ({"__pycache__"} & set(names))


def run_there(test: str, there: Sequence[Place]) -> Run:
    """The first run in which nothing is missing; otherwise the first one."""
    runs = []
    for place in there:
        runs.append(place.run(test))
        if runs[-1].outcome is not Outcome.LACKS:
            return runs[-1]
    return runs[0]


def compare(tests: Mapping[str, Sequence[str]], checkout: Path) -> int:
    """Prints each test with how it ends here and there. 1 where one fails here or passes there.

    tests: of each defect, by its name.
    """
    wrong = 0
    here = Place(TESTS.parent, Path(sys.executable))
    with places(checkout.resolve()) as there:
        for name, its in tests.items():
            for test in its:
                ours, theirs = here.run(test), run_there(test, there)
                is_right = (ours.outcome is Outcome.PASSES) > (theirs.outcome is Outcome.PASSES)
                wrong += not is_right
                mark = "" if is_right else "  WRONG"
                print(f"{name:16} tests/{test}{mark}")
                print(f"{'':16}   here {ours.outcome.value} {ours.why}".rstrip())
                print(f"{'':16}   there {theirs.outcome.value}: {theirs.why}", flush=True)
    print(f"{sum(map(len, tests.values()))} tests of {len(tests)} defects, {wrong} wrong")
    return 1 if wrong else 0
