"""What the extension says of itself: a process of its own, because it may not even load."""

import json
import resource
import sys
from importlib.metadata import version
from typing import Any


def facts() -> dict[str, Any]:
    """Return the facts, of JSON's own types. Raises ImportError with what does not match."""

    import metal_ext
    from metal_ext import _ext

    return {
        "mlx_built_for": _ext.MLX_VERSION,
        "has_metal": metal_ext.HAS_METAL,
        "metal": metal_ext.metal_capabilities() if metal_ext.HAS_METAL else {},
        "instruction_sets": metal_ext.instruction_sets(),
        "system_page_bytes": metal_ext.SYSTEM_PAGE_BYTES,
        "matrix_products": "MLX's own" if metal_ext.HAS_METAL else "quire's own",
        "quire": version("quire"),
        "default_device": default_device(),
        "open_files": open_files(),
    }


def default_device() -> str:
    """Return what MLX computes on where nothing says otherwise. It is loaded after the
    extension."""
    import mlx.core as mx

    return str(mx.default_device())


def open_files() -> dict[str, int | None]:
    """Return the limits of this process as it came, None for none; and what becomes of the soft one
    when the engine raises it."""
    from engine.machine import raise_descriptor_limit

    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return {"soft": soft, "hard": hard, "raised": raise_descriptor_limit()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()) + "\n")
