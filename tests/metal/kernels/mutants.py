"""Breaks the kernels on purpose, one at a time, and looks whether the tests see it.

``python -m tests.metal.kernels.mutants BUILD K/N``: the Makefile has built the unbroken kernels
there; every N-th is tried, from the K-th on. Prints every mutant with what has killed it.
"""

import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.metal.kernels.mutations import MUTATIONS, Mutation
from tests.metal.msl.translate import replaced, translate
from tests.metal.parts import part_of

JOBS = 2
TIMEOUT_S = 1200  # of one that hangs
MAKE = ("make", "-C", "tests/metal", "--silent")
# A test that fails, or in which python dies; where it dies of what a test has broken, soon after.
TEST = re.compile(r"^(?:_+ |\S+::)(test_\w+)|line \d+ in (test_\w+)", re.MULTILINE)
RACE_EDIT = ("kDecodeThreads = 256", "kDecodeThreads = 128")
SANITIZERS = ("ThreadSanitizer: data race", "AddressSanitizer: [a-z-]+", "runtime error: .*")


def broken_text(build: Path, mutation: Mutation) -> str:
    """The C++ of one text with its mistake."""
    path = build / mutation.rung / f"kernels_{mutation.file}.metal"
    text = path.read_text()
    if mutation.rung == "races":
        text = replaced(text, *RACE_EDIT)
    return translate(replaced(text, mutation.old, mutation.new), path=path.name)


def killer(done: subprocess.CompletedProcess[str]) -> str | None:
    """What has seen that something is broken; None where nothing has."""
    if done.returncode == 0:
        return None
    said = done.stdout + done.stderr
    for words in SANITIZERS:
        if found := re.search(words, said):
            return found[0]
    test = next((failed or running for failed, running in TEST.findall(said)), "")
    assert test, said
    if found := re.search(r"MSL: .*?: (.*)", said):
        return f"{test}: {found[1]}"
    return f"{test}: no memory there" if "Segmentation fault" in said else test


def judge(build: Path, mutation: Mutation) -> str | None:
    """Compiles and tries one mutant."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "broken"
        broken.with_suffix(".cpp").write_text(broken_text(build, mutation))
        which = (f"BROKEN={broken}", f"FILE={mutation.file}")
        subprocess.run(
            [*MAKE, f"broken-{mutation.rung}", *which], check=True, stdout=subprocess.DEVNULL
        )
        return killer(
            subprocess.run(
                [*MAKE, f"try-{mutation.rung}", *which],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        )


def main() -> None:
    tried = part_of(MUTATIONS, sys.argv[2])
    with ThreadPoolExecutor(JOBS) as pool:
        killers = list(pool.map(partial(judge, Path(sys.argv[1])), tried))
    for mutation, by in zip(tried, killers, strict=True):
        print(f"{mutation.file:8} {mutation.what:52} {by or 'SURVIVES'}")
    survivors = killers.count(None)
    print(f"{len(tried)} of {len(MUTATIONS)} mutants, {survivors} survive")
    sys.exit(survivors != 0)


if __name__ == "__main__":
    main()
