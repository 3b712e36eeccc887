"""Device bytes: heaps, address ranges, and the MLX primitives that read and write them.

Importing this package loads the BLAS, then MLX, then the extension, and checks that the three fit
together. It must be imported before MLX.
"""

from . import blas as blas

fast_blas: blas.FastBLAS | None = blas.load()

from .self_test import require_matching_versions  # noqa: E402  MLX must come after the BLAS

require_matching_versions()

from ._ext import (  # noqa: E402
    SYSTEM_PAGE_BYTES,
    AddressRange,
    CopyCounter,
    CpuWorkers,
    Geometry,
    Heap,
    Layer,
    Mapper,
    RowTable,
    append,
    block_copy,
    chunk_attention,
    decode_attention,
    instruction_sets,
    read_seconds,
    region_view,
)

__all__ = [
    "SYSTEM_PAGE_BYTES",
    "AddressRange",
    "CopyCounter",
    "CpuWorkers",
    "Geometry",
    "Heap",
    "Layer",
    "Mapper",
    "RowTable",
    "append",
    "block_copy",
    "chunk_attention",
    "decode_attention",
    "fast_blas",
    "instruction_sets",
    "read_seconds",
    "region_view",
]
