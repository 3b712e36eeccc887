"""Sets environment variables for MLX, and checks that MLX and the extension fit together.

MLX reads the variables when it makes its first array. Values that the user has set are kept. Builds
detect no mismatch of versions, but MLX's C++ interface changes in patch releases, and nanobind
passes arrays between extensions only if both were built with the same internals."""

import ctypes
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, MutableMapping

# A Metal queue takes 32 residency sets, of which quire may use 24. MLX uses one set while its limit
# of wired memory is 0, as quire leaves it. With a higher limit, MLX uses several: by default, one
# for each 5 % of the GPU's usable memory. With 20 % in this variable, there are fewer sets.
RESIDENCY_VARIABLE = "MLX_RESIDENCY_SET_MAX_PCT"
RESIDENCY_PERCENT = "20"

# MLX submits a command buffer after 40 or 50 commands, or when its commands use 40 or 50 times 2^20
# numbers, without weights (MlxOps.stop_counting). A command buffer costs the GPU about 20 us
# (mlx#4521), but larger ones made an M5 slower (mlxcel#360). So only older chips get larger ones.
# A limit of over 250 commands (16 dense layers) would save 1 % of a step, but delay its start. With
# fewer, a step of a large mixture would take more than ten buffers, and MLX queues ten.
# Intermediate results live until their command buffer, one of those ten, completes. With a limit of
# 100 times 2^20 numbers, the intermediate results of a long prompt take 2 GiB, for which the memory
# plan leaves room.
LARGER_BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": "250", "MLX_MAX_MB_PER_BUFFER": "100"}
TAKE_LARGER_BUFFERS = re.compile(r"Apple M[1-4]\b")

PROCESSOR = b"machdep.cpu.brand_string"
MOST_BYTES = 256
MENDED = "install quire again (in a checkout: `make setup`)"
NEEDED = re.compile(r"mlx(?:\[cpu\])?==(?P<version>[\d.]+)")


def prepare_environment(
    environment: MutableMapping[str, str] = os.environ,
    platform: str = sys.platform,
    processor: Callable[[], str] | None = None,
) -> None:
    """Set each variable that is not set. ``processor`` returns a name like Apple M1 Max."""
    if platform != "darwin":
        return
    environment.setdefault(RESIDENCY_VARIABLE, RESIDENCY_PERCENT)
    if TAKE_LARGER_BUFFERS.match((processor or processor_name)()):
        for variable, most in LARGER_BUFFERS.items():
            environment.setdefault(variable, most)


def processor_name() -> str:
    """Return the processor's name on macOS, or "" if the system does not report it."""
    call = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if call is None:
        return ""
    name, size = ctypes.create_string_buffer(MOST_BYTES), ctypes.c_size_t(MOST_BYTES)
    failed = call(PROCESSOR, name, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else name.value.decode(errors="replace")


def require_matching_versions() -> None:
    """Raise an ImportError that describes a mismatch of versions and its remedy."""
    installed = importlib.metadata.version("mlx")
    try:
        from . import _ext
    except ImportError as error:
        # The library of another version usually lacks symbols that the extension needs.
        needed = _needed_version()
        if needed not in (None, installed):
            raise _built_for(needed, installed) from error
        raise ImportError(
            f"the native extension cannot be loaded with mlx {installed} ({error}): {MENDED}",
            name=__package__,
        ) from error
    if installed != _ext.MLX_VERSION:
        raise _built_for(_ext.MLX_VERSION, installed)
    _require_array_exchange()


def _needed_version() -> str | None:
    """Return the version of MLX that the installed quire requires, or None if it is unknown."""
    try:
        required = importlib.metadata.requires("quire") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((found["version"] for line in required if (found := NEEDED.match(line))), None)


def _built_for(needed: str, installed: str) -> ImportError:
    return ImportError(
        f"the native extension was built for mlx {needed}, but mlx {installed} is installed: "
        f"{MENDED}",
        name=__package__,
    )


def _require_array_exchange() -> None:
    import mlx.core as mx

    from . import _ext

    page = _ext.SYSTEM_PAGE_BYTES
    geometry = _ext.Geometry(
        page_bytes=page,
        tokens_per_block=page // 128,
        blocks_per_heap=1,
        blocks_per_range=1,
        region_row_bytes=[128, 128],
    )
    address_range = _ext.AddressRange.sparse(geometry)
    address_range.map(_ext.Heap.shared(geometry), 0, 0, 1, writable=True)
    try:
        _ext.region_view(mx.zeros((1,)), address_range, 0, 1, 1, 32, mx.float32)
    except TypeError as error:
        raise ImportError(
            "the native extension and mlx were built with different versions of nanobind, so that "
            f"arrays cannot pass between them: {MENDED}",
            name=__package__,
        ) from error
