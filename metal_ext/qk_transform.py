"""What queries and keys take before keys are kept, as the kernels know it."""

from dataclasses import dataclass

import mlx.core as mx

from ._ext import RopeTable


@dataclass(frozen=True, slots=True, eq=False)
class QKTransform:
    """RMS norms over head_dim, then RoPE over the halves of a head; each where it is given."""

    norms: tuple[mx.array, mx.array, float] | None
    """The weights of queries and of keys, ``[head_dim]`` float32, and eps."""
    rope: RopeTable | None
