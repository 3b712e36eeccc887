"""The BLAS that MLX's CPU backend multiplies with.

MLX's Linux wheel carries a reference BLAS that reaches a few GFLOP/s. ``load`` puts OpenBLAS in its
place for float32 products; on a Mac MLX uses Accelerate and nothing is loaded.
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._ext import CpuWorkers

LIBRARY = "libquire_blas.so"
# "openblas" (the default on Linux) or "mlx": the one that MLX brings.
CHOICE_VARIABLE = "QUIRE_BLAS"


class FastBLAS:
    """OpenBLAS in the place of MLX's own BLAS."""

    name = "OpenBLAS"

    def __init__(self, library: ctypes.CDLL) -> None:
        library.quire_blas_calls.restype = ctypes.c_uint64
        library.quire_blas_calls.argtypes = []
        self._library = library

    @property
    def calls(self) -> int:
        """How many matrix products have gone through it."""
        return int(self._library.quire_blas_calls())

    def use(self, workers: "CpuWorkers") -> None:
        """Has products run on these workers from now on; before, each runs on the one thread that
        asks for it. A product has the same bits on any number of threads."""
        from ._ext import multiply_on  # MLX, which it needs, comes after the BLAS

        multiply_on(workers)


def library_path() -> Path | None:
    """Where the build put the library: beside the package's sources, or in site-packages."""
    folders = [Path(__file__).parent]
    folders += [Path(entry) / __package__ for entry in sys.path if entry]
    return next((f / LIBRARY for f in folders if (f / LIBRARY).is_file()), None)


def load() -> FastBLAS | None:
    """Loads OpenBLAS for MLX; None on a Mac, or where ``QUIRE_BLAS=mlx`` asks for MLX's own.

    Raises ImportError where MLX was imported before (its products are bound already), where the
    library was not built, or where the choice is not known.
    """
    choice = os.environ.get(CHOICE_VARIABLE, "openblas")
    if choice not in ("openblas", "mlx"):
        raise ImportError(f"{CHOICE_VARIABLE} is {choice!r}; it must be openblas or mlx")
    if sys.platform != "linux" or choice == "mlx":
        return None
    path = library_path()
    if path is None:
        raise ImportError(f"{LIBRARY} was not built: run `make setup`")
    if "mlx.core" in sys.modules:
        raise ImportError("import metal_ext before mlx: its BLAS must be loaded first")
    return FastBLAS(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))
