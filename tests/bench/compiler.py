"""Compiles what the benchmark has of its own in C++."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

BUILD = Path(__file__).parents[2] / "build" / "bench"
OPTIONS = ("-O3", "-std=c++20", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 120.0


class CompilerError(OSError):
    """What the benchmark has of its own cannot be compiled; a sentence."""


def compiled(folder: Path, options: Sequence[str]) -> Path:
    """A folder's texts as one library, compiled once for each text and each set of options. Raises
    CompilerError."""
    texts = [file.read_bytes() for file in sorted(folder.iterdir())]
    text = b"".join([*texts, " ".join((*OPTIONS, *options)).encode()])
    file = BUILD / f"{folder.name}-{hashlib.sha256(text).hexdigest()[:16]}.{sys.platform}"
    if not file.exists():
        _compile(file, sorted(folder.glob("*.cpp")), options)
    return file


def _compile(file: Path, sources: Sequence[Path], options: Sequence[str]) -> None:
    """Whole or not at all: others may compile at the same time."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        raise CompilerError(f"no C++ compiler of {', '.join(names)}: set CXX")
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [compiler, *OPTIONS, "-o", str(made), *map(str, sources), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if done.returncode != 0:
            raise CompilerError(f"{file.stem} does not compile:\n{done.stderr}")
        made.replace(file)
