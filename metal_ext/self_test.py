"""Does the extension fit the MLX that is installed?

MLX's C++ interface changes in patch releases, and nanobind passes arrays between two extensions
only if both were built with the same internals. Neither mismatch fails at build time, so it is
looked for at import, and said in one sentence.
"""

import importlib.metadata
import re

MENDED = "install quire again (in a checkout: `make setup`)"
NEEDED = re.compile(r"mlx(?:\[cpu\])?==(?P<version>[\d.]+)")


def require_matching_versions() -> None:
    """Raises ImportError that names what does not match and how to mend it."""
    installed = importlib.metadata.version("mlx")
    try:
        from . import _ext
    except ImportError as error:
        # The library of another version rarely has all that the extension asks for.
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
    """MLX's, by what is installed as quire; None where that is not a package."""
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
