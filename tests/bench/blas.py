"""A fast BLAS for MLX on Linux, so that mlx-lm is compared at its best.

MLX's Linux wheel carries a reference BLAS that reaches a few GFLOP/s. A process that is started
with ``environment`` multiplies float32 by OpenBLAS. On a Mac MLX uses Accelerate, and there is
nothing to do. quire multiplies by its own kernels.
"""

import ctypes
import os
import sys
from pathlib import Path

from tests.bench.compiler import compiled


def environment(threads: int) -> dict[str, str]:
    """The variables of a process whose MLX multiplies fast. Raises CompilerError."""
    return {"LD_PRELOAD": str(library()), "OMP_NUM_THREADS": str(threads)} if wanted() else {}


def wanted() -> bool:
    """Whether this system's MLX would multiply slowly."""
    return sys.platform == "linux"


def library() -> Path:
    """The library that is loaded before MLX, compiled where it is not there yet."""
    import scipy_openblas32 as openblas

    folder = openblas.get_lib_dir()
    return compiled(
        Path(__file__).parent / "openblas",
        [
            "-fopenmp",
            f"-I{openblas.get_include_dir()}",
            f"-L{folder}",
            f"-l{openblas.get_library()}",
            f"-Wl,-rpath,{folder}",
        ],
    )


def calls() -> int | None:
    """How many products of this process have gone through it; None: it is not there."""
    try:
        count = ctypes.CDLL(None).bench_blas_calls
    except AttributeError:
        return None
    count.restype = ctypes.c_uint64
    return int(count())


def restart_with_it(threads: int) -> None:
    """Begin this program again where it has begun without it."""
    if wanted() and calls() is None:
        os.execve(sys.executable, sys.orig_argv, os.environ | environment(threads))
