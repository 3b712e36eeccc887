"""Does the extension fit the MLX that is installed?

MLX's C++ interface changes in patch releases, and nanobind passes arrays between two extensions
only if both were built with the same internals. Neither mismatch fails at build time, so it is
looked for at import, and said in one sentence.
"""

import importlib.metadata


def require_matching_versions() -> None:
    """Raises ImportError that names what does not match and how to mend it."""
    installed = importlib.metadata.version("mlx")
    try:
        from . import _ext
    except ImportError as error:
        raise ImportError(
            f"the native extension cannot be loaded with mlx {installed} ({error}): "
            "run `make setup`"
        ) from error
    if installed != _ext.MLX_VERSION:
        raise ImportError(
            f"the native extension was built for mlx {_ext.MLX_VERSION}, but mlx {installed} is "
            "installed: run `make setup`"
        )
    _require_array_exchange()


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
            "arrays cannot pass between them: run `make setup`"
        ) from error
