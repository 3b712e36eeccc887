"""The benchmark's own libraries in C++: the read probe, and a fast BLAS for MLX on Linux.

MLX's Linux wheel carries a reference BLAS that reaches a few GFLOP/s. A process that is started
with ``fast_blas`` multiplies float32 by OpenBLAS, so that mlx-lm is compared at its best. On a Mac
MLX uses Accelerate, and there is nothing to do. quire multiplies by its own kernels.
"""

import ctypes
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
    """A library of the benchmark's cannot be compiled; a sentence."""


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


def fast_blas(threads: int) -> dict[str, str]:
    """The variables of a process whose MLX multiplies fast. Raises CompilerError."""
    if sys.platform != "linux":
        return {}
    import scipy_openblas32 as openblas

    folder = openblas.get_lib_dir()
    library = compiled(
        Path(__file__).parent / "openblas",
        [
            "-fopenmp",
            f"-I{openblas.get_include_dir()}",
            f"-L{folder}",
            f"-l{openblas.get_library()}",
            f"-Wl,-rpath,{folder}",
        ],
    )
    return {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": str(threads)}


def fast_products() -> int:
    """How many products of this process have gone through the fast BLAS."""
    try:
        count = ctypes.CDLL(None).bench_blas_calls
    except AttributeError:
        return 0
    count.restype = ctypes.c_uint64
    return int(count())
