"""How many bytes a checkpoint's tensors take once they are packed for the CPU's kernels.

As in kernels/cpu/linear.h: 16 outputs make a panel, numbers are filled up to 32 inputs, and float16
is kept as float32.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from engine.model_config import Quantization
from engine.safetensors_headers import Tensor

PANEL_OUTPUTS = 16
INPUT_STEP = 32
GROUP_SIZES = (32, 64, 128)
JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Layers that become one, in the order of their outputs."""

Kind = tuple[str, Quantization | None]
"""Of what dtype the numbers are, or scales and biases where there are groups."""


def packed_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    packing_of: Callable[[str], Quantization | None],
) -> int | None:
    """Return the bytes of all tensors; None where a layer cannot be packed.

    shapes: unpacked ones, by name. packing_of: how the checkpoint groups a layer of that name.
    """
    kinds: dict[str, Kind] = {}
    total = 0
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if len(shape) == 1:
            total += 4 * math.prod(shape)
            continue
        scales = tensors.get(f"{layer}.scales")
        packing = packing_of(layer) if scales is not None else None
        kinds[layer] = (tensors[name].dtype if scales is None else scales.dtype, packing)
        if packing is not None and packing.group_size not in GROUP_SIZES:
            return None
        total += _layer_bytes(shape, kinds[layer])
    return total if _can_be_joined(shapes, kinds) else None


def _layer_bytes(shape: Sequence[int], kind: Kind) -> int:
    outputs, inputs = _rounded_up(shape[0], PANEL_OUTPUTS), shape[1]
    dtype, packing = kind
    number = 2 if dtype == "BF16" else 4
    if packing is None:
        return outputs * _rounded_up(inputs, INPUT_STEP) * number
    groups = inputs // packing.group_size
    return outputs * (inputs * packing.bits // 8 + groups * 2 * number)


def _can_be_joined(shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, Kind]) -> bool:
    """Return whether the parts of every joined layer are alike, and fill their panels but for the
    last."""
    for layer in kinds:
        for names in JOINED:
            if not layer.endswith(names[0]):
                continue
            parts = [layer.removesuffix(names[0]) + name for name in names]
            alike = {kinds[part] for part in parts}
            filled = (shapes[f"{part}.weight"][0] % PANEL_OUTPUTS == 0 for part in parts[:-1])
            if len(alike) > 1 or not all(filled):
                return False
    return True


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step
