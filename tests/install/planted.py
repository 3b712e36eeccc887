"""Faults planted in a wheel's module, each of which the checks of linux_build.py must name.

    python -m tests.install.planted WHEEL MODULE MACHINE

A gate that has never refused anything proves nothing. wheels.py runs it in the root of the builds.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

from tests.install.linux_build import CROSS, LIBMLX, audited, complaints_of_module

# How patchelf puts each in, and words of the complaint.
FAULTS = (
    (["--set-rpath", "/usr/local/lib"], "search paths"),
    (["--remove-rpath"], "search paths"),
    (["--add-needed", "libopenblas.so.0"], "which not every system has"),
    (["--remove-needed", LIBMLX], "does not ask for"),
)
# A module that asks for a function which the C library has since 2.36.
TOO_NEW = "unsigned arc4random(void); unsigned PyInit__ext(void) { return arc4random(); }"


def missed(wheel: Path, module: str, machine: str) -> list[str]:
    """The faults that nothing has named, in sentences."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        unpacked, out = Path(folder) / "unpacked", Path(folder) / "out"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        good = unpacked / module
        for options, words in FAULTS:
            broken = Path(folder) / "broken.so"
            shutil.copy(good, broken)
            subprocess.run(["patchelf", *options, str(broken)], check=True)
            with broken.open("rb") as stream:
                said = complaints_of_module(ELFFile(stream))
            if not any(words in sentence for sentence in said):
                found.append(f"a module after patchelf {' '.join(options)} was let through: {said}")
        gcc = CROSS.format(machine=machine, tool="gcc")
        compiled = [gcc, "-shared", "-fPIC", "-x", "c", "-", "-o", str(good)]
        subprocess.run(compiled, input=TOO_NEW.encode(), check=True)
        out.mkdir()
        python = [sys.executable, "-m"]
        pack = [*python, "wheel", "pack", "--dest-dir", str(out), str(unpacked)]
        subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
        (new,) = out.glob("*.whl")
        try:
            found.append(f"{audited(new, Path(folder) / 'audited').name} was let through")
        except ValueError as error:
            print(error)
    return found


def main() -> int:
    """The exit code."""
    wheel, module, machine = sys.argv[1:]
    found = missed(Path(wheel), module, machine)
    for sentence in found:
        print(f"MISSED: {sentence}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
