"""Writes the Metal kernels to files as the host puts them together, with every instance.

    python tests/metal/hosted/kernel_files.py FOLDER

One file per text of metal_ext/kernels/metal. Needs cmake and a C++ compiler: the list of instances,
and how texts are joined, are the host's own (metal_ext/csrc/core/metal/kernel_text.cpp).
"""

import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
NATIVE = ROOT / "metal_ext"


def write_kernel_files(folder: Path) -> dict[str, list[str]]:
    """Writes ``folder/NAME.metal``; returns the kernels of each file by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    printer = _build_printer(folder)
    kernels: dict[str, list[str]] = defaultdict(list)
    for line in _output([printer]).splitlines():
        kernel, file = line.split()
        kernels[file].append(kernel)
    for file, names in kernels.items():
        (folder / file).write_text(_output([printer, *names]))
    return dict(kernels)


def _build_printer(folder: Path) -> str:
    # cmake may have come with the packages of this Python.
    beside_python = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=beside_python)
    if cmake is None:
        raise FileNotFoundError("cmake is neither on the path nor beside this Python")
    texts, printer = folder / "kernel_texts.cpp", folder / "print_kernels"
    _output([cmake, f"-DOUTPUT={texts}", "-P", str(NATIVE / "kernels/metal/embed.cmake")])
    sources = [ROOT / "tests/metal/msl/print_kernels.cpp", texts]
    sources.append(NATIVE / "csrc/core/metal/kernel_text.cpp")
    compiler = os.environ.get("CXX", "c++")
    _output([compiler, "-std=c++20", f"-I{NATIVE / 'csrc'}", f"-I{NATIVE / 'kernels'}",
             "-o", str(printer), *map(str, sources)])  # fmt: skip
    return str(printer)


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    found = write_kernel_files(Path(sys.argv[1]))
    print(f"{sum(map(len, found.values()))} kernels in {len(found)} files: {', '.join(found)}")
