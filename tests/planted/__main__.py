"""Plant the mistakes of a suite, one at a time, and say what finds them.

    python -m tests.planted core|kernels|simulation [K/N]

K/N: every N-th mistake, from the K-th on. A mistake that survives, or does not build, fails the
run. The makefiles of tests/metal build core and kernels first.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.planted import suites
from tests.planted.suites import ROOT, Mistake, read_mistakes

SUITES = {
    "core": suites.try_core,
    "kernels": suites.try_kernels,
    "simulation": suites.try_simulation,
}


def part_of(mistakes: Sequence[Mistake], which: str) -> Sequence[Mistake]:
    first, step = map(int, which.split("/"))
    assert 1 <= first <= step, which
    return mistakes[first - 1 :: step]


def judge(mistake: Mistake) -> tuple[str, str]:
    """Return the verdict on the mistake, and some words on it."""
    with TemporaryDirectory() as folder:
        try:
            found = SUITES[mistake.suite](mistake, Path(folder))
        except subprocess.CalledProcessError as error:
            return "does not build", error.stderr.strip()[-500:]
        except subprocess.TimeoutExpired as error:
            return "survives", f"{error.timeout} s"
    return ("found", found.splitlines()[0]) if found else ("survives", "")


def main(suite: str, which: str = "1/1") -> int:
    if suite not in SUITES:
        sys.exit(__doc__)
    every = [mistake for mistake in read_mistakes() if mistake.suite == suite]
    with TemporaryDirectory() as folder:
        if suite == "simulation" and (words := suites.hunt_without_mistake(Path(folder))):
            sys.exit(f"found without a mistake: {words}")
    counts = {"found": 0, "survives": 0, "does not build": 0}
    tried = part_of(every, which)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mistake, (verdict, words) in zip(tried, pool.map(judge, tried), strict=True):
            print(f"{mistake.file}: {mistake.name}: {verdict}: {words}", flush=True)
            counts[verdict] += 1
    result = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    summary = f"{len(tried)} of {len(every)} mistakes planted: {result}"
    log = ROOT / f"build/planted/{suite}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"{summary}\n")
    print(summary)
    return int(counts["found"] < len(tried))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
