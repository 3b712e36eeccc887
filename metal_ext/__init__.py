"""Heaps, address ranges, and MLX primitives that read and write K and V there.

Importing this package loads MLX and the native extension, and checks that the versions match."""

from dataclasses import dataclass

from .loading import prepare_environment, require_matching_versions

prepare_environment()
require_matching_versions()

import mlx.core as mx  # noqa: E402, I001

from ._ext import (  # noqa: E402
    HAS_METAL as HAS_METAL,
    SYSTEM_PAGE_BYTES as SYSTEM_PAGE_BYTES,
    AddressRange as AddressRange,
    CopyCounter as CopyCounter,
    CpuWorkers as CpuWorkers,
    GatedDelta as GatedDelta,
    Geometry as Geometry,
    Heap as Heap,
    Layer as Layer,
    Mapper as Mapper,
    PackedExperts as PackedExperts,
    PackedLinear as PackedLinear,
    RopeTable as RopeTable,
    RowTable as RowTable,
    Softmax as Softmax,
    StateMemory as StateMemory,
    StateRows as StateRows,
    append as append,
    block_copy as block_copy,
    choose_tokens as choose_tokens,
    chunk_attention as chunk_attention,
    decode_attention as decode_attention,
    gated_delta as gated_delta,
    gated_mlp as gated_mlp,
    instruction_sets as instruction_sets,
    linear as linear,
    linear_heads as linear_heads,
    mixture_mlp as mixture_mlp,
    packed_bytes as packed_bytes,
    packed_rows as packed_rows,
    project_append as project_append,
    region_view as region_view,
    rms_norm as rms_norm,
    rope_angles as rope_angles,
    uncounted as uncounted,
)

if HAS_METAL:
    from ._ext import (  # noqa: I001
        MetalRows as MetalRows,
        MetalStateRows as MetalStateRows,
        MetalKVBackend as MetalKVBackend,
        Mixture as Mixture,
        StoredMatrix as StoredMatrix,
        gather as gather,
        metal_capabilities as metal_capabilities,
        mixture as mixture,
        multiply as multiply,
        multiply_gated as multiply_gated,
        step_end as step_end,
    )


@dataclass(frozen=True, slots=True, eq=False)
class QKTransform:
    """Changes queries and keys before keys are stored: RMS norms over head_dim, then RoPE. Either
    may be None."""

    norms: tuple[mx.array, mx.array, float] | None
    """The norms' weights (queries, keys), ``[head_dim]`` float32, and the norms' epsilon."""
    rope: RopeTable | None
