"""For each suite, what builds sources with a mistake and runs the tests that must find it.

Each function returns what found the mistake, and nothing where it survives. Raises
CalledProcessError where the mistake does not build, and TimeoutExpired.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kvcache.memory_budget import BudgetError
from tests.planted.table import PARTS, ROOT, Mistake
from tests.simulation.faults import SeedFailedError, SimulationError
from tests.simulation.mac import mac_hour
from tests.simulation.seeds import run_seeds

LIMIT_S = 1200
# The tests of the core wait for events that a mistake may never let come.
CORE_LIMIT_S = 120
LIVES_PERCENT = 5
# A make for each mistake, beside the one that may have started this.
ENVIRONMENT = {name: value for name, value in os.environ.items() if "MAKE" not in name}
PACKAGES = ("engine", "kvcache")
COPIED = tuple(f"{package}." for package in PACKAGES)
SEEDS = 400  # most mistakes are found within ten
# The installed project has a finder that would win against any path.
HUNT = """
import sys
from importlib.machinery import PathFinder
sys.meta_path.insert(0, PathFinder)
from tests.planted.suites import hunt_in_copies
hunt_in_copies()
"""
# What is included is tried where it is used.
LIBRARIES = {"rows": "gather"}
# A test that fails, or in which python dies; where it dies of what a test has broken, soon after.
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
    """The plain build of tests/metal/core with one file exchanged."""
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
    """A library of tests/metal/kernels, with the text of one file exchanged."""
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
    """The simulator over copies of the packages."""
    copy_packages(folder)
    copied = folder / mistake.file
    copied.write_text(mistake.plant(copied.read_text()))
    found = [start_hunt(folder, mistake.seed, part) for part in mistake.parts]
    return "; ".join(found) if all(found) else ""


def hunt_without_mistake(folder: Path) -> str:
    copy_packages(folder)
    return "".join(start_hunt(folder, 0, part, seeds=20) for part in PARTS["simulation"])


def copy_packages(folder: Path) -> None:
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)


def start_hunt(folder: Path, first: int, part: str, seeds: int = SEEDS) -> str:
    program = (sys.executable, "-c", HUNT, str(first), str(seeds), part)
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = run(*program, cwd=folder, check=True, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
    return done.stdout.strip()


# --- in the process of a hunt, whose working folder has the copies ---------------------------


def hunt(seeds: range, part: str) -> str:
    """Run seeds until one fails, or an hour of a Mac; return what is wrong, or nothing."""
    if part != "mac":
        runs = (run_seeds([seed], states=part == "states")[1] for seed in seeds)
        return next((failed[0].reason for failed in runs if failed), "")
    try:
        mac_hour()
    except SeedFailedError as error:
        return error.reason
    except (BudgetError, SimulationError) as error:
        return str(error)
    return ""


def hunt_in_copies() -> None:
    """Print what was found. Exits where other files than the copies were run."""
    first, seeds, part = sys.argv[1:]
    print(hunt(range(int(first), int(first) + int(seeds)), part))
    copied = [module for name, module in sys.modules.items() if name.startswith(COPIED)]
    strangers = {module.__file__ for module in copied if module.__file__} - {
        str(file) for file in Path.cwd().rglob("*.py")
    }
    if strangers:
        sys.exit(f"not the copies were run: {strangers}")
