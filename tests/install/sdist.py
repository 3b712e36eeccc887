"""Makes the archive of the sources, into build/wheels, and checks what is in it.

    python -m tests.install.sdist

It has all that the checkout has under version control, tests and demo model included: whoever
builds from it can check what came of it.
"""

import os
import sys
import tarfile
from pathlib import Path

import scikit_build_core.build

from tests.install.roots import ROOT, tracked

FOLDER = ROOT / "build" / "wheels"
# Written by the build.
WRITTEN = {"PKG-INFO"}
MUST_HAVE = {
    "LICENSE",
    "CHANGELOG.md",
    "README.md",
    "pyproject.toml",
    "configs/locks/requirements.lock",
    "Makefile",
}


def complaints(archive: Path, expected: set[str]) -> list[str]:
    """Return all that is wrong with the archive, in sentences."""
    with tarfile.open(archive) as sources:
        names = [member.name.partition("/") for member in sources.getmembers() if member.isfile()]
    found = []
    if {top for top, _, _ in names} != {archive.name.removesuffix(".tar.gz")}:
        found.append(f"it has more than one folder: {sorted({top for top, _, _ in names})}")
    present = {name for _, _, name in names}
    found += [f"{name} is missing" for name in sorted(expected - present)]
    found += [f"{name} has no business in it" for name in sorted(present - expected - WRITTEN)]
    return found


def main() -> int:
    os.chdir(ROOT)
    FOLDER.mkdir(parents=True, exist_ok=True)
    archive = FOLDER / scikit_build_core.build.build_sdist(str(FOLDER))
    wrong = complaints(archive, set(tracked()) | MUST_HAVE)
    for sentence in wrong:
        print(f"WRONG: {archive.name}: {sentence}")
    print(f"{archive.name}: {archive.stat().st_size / 2**20:.1f} MiB, {len(wrong)} complaints")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
