"""Device bytes: heaps, address ranges, and the MLX primitives that read and write them.

Importing this package loads MLX, then the extension, and checks that the two fit together.
"""

from .environment import prepare

prepare()

from .self_test import require_matching_versions  # noqa: E402  which loads MLX

require_matching_versions()

from ._ext import (  # noqa: E402
    HAS_METAL,
    SYSTEM_PAGE_BYTES,
    AddressRange,
    CopyCounter,
    CpuWorkers,
    GatedDelta,
    Geometry,
    Heap,
    Layer,
    Mapper,
    PackedExperts,
    PackedLinear,
    RopeTable,
    RowTable,
    StateMemory,
    StateRows,
    append,
    block_copy,
    choose_tokens,
    chunk_attention,
    decode_attention,
    gated_delta,
    gated_mlp,
    instruction_sets,
    linear,
    linear_heads,
    mixture_mlp,
    packed_bytes,
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
    "GatedDelta",
    "Geometry",
    "Heap",
    "Layer",
    "Mapper",
    "PackedExperts",
    "PackedLinear",
    "QKTransform",
    "RopeTable",
    "RowTable",
    "StateMemory",
    "StateRows",
    "append",
    "block_copy",
    "choose_tokens",
    "chunk_attention",
    "decode_attention",
    "gated_delta",
    "gated_mlp",
    "instruction_sets",
    "linear",
    "linear_heads",
    "mixture_mlp",
    "packed_bytes",
    "packed_rows",
    "project_append",
    "region_view",
    "rms_norm",
    "rope_angles",
]

if HAS_METAL:
    from ._ext import (
        MetalRows,
        MetalStateRows,
        MetalSubstrate,
        gather,
        metal_capabilities,
        step_end,
        swiglu,
    )

    __all__ += [
        "MetalRows",
        "MetalStateRows",
        "MetalSubstrate",
        "gather",
        "metal_capabilities",
        "step_end",
        "swiglu",
    ]
