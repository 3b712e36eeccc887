"""Device bytes: heaps, address ranges, and the MLX primitives that read and write them.

Importing this package loads the BLAS, then MLX, then the extension, and checks that the three fit
together. It must be imported before MLX.
"""

from . import blas as blas
from .environment import prepare

prepare()
fast_blas: blas.FastBLAS | None = blas.load()

from .self_test import require_matching_versions  # noqa: E402  MLX must come after the BLAS

require_matching_versions()

from ._ext import (  # noqa: E402
    HAS_METAL,
    SYSTEM_PAGE_BYTES,
    AddressRange,
    CopyCounter,
    CpuWorkers,
    Geometry,
    Heap,
    Layer,
    Mapper,
    PackedLinear,
    RopeTable,
    RowTable,
    append,
    block_copy,
    choose_tokens,
    chunk_attention,
    decode_attention,
    gated_mlp,
    instruction_sets,
    linear,
    packed_rows,
    project_append,
    region_view,
    rms_norm,
    rope_angles,
)
from .qk_transform import QKTransform  # noqa: E402

__all__ = [
    "HAS_METAL",
    "SYSTEM_PAGE_BYTES",
    "AddressRange",
    "CopyCounter",
    "CpuWorkers",
    "Geometry",
    "Heap",
    "Layer",
    "Mapper",
    "PackedLinear",
    "QKTransform",
    "RopeTable",
    "RowTable",
    "append",
    "block_copy",
    "choose_tokens",
    "chunk_attention",
    "decode_attention",
    "fast_blas",
    "gated_mlp",
    "instruction_sets",
    "linear",
    "packed_rows",
    "project_append",
    "region_view",
    "rms_norm",
    "rope_angles",
]

if HAS_METAL:
    from ._ext import (
        MetalRows,
        MetalSubstrate,
        gather,
        metal_capabilities,
        step_end,
    )

    __all__ += [
        "MetalRows",
        "MetalSubstrate",
        "gather",
        "metal_capabilities",
        "step_end",
    ]
