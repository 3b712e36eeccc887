"""What weights and K and V weigh, in bytes, by how their numbers are packed.

Everything here is exact for a shape and counts in bytes; people read it in GiB (2**30).
"""

import math
from dataclasses import dataclass

import metal_ext
from engine.models.config import AFFINE, Quantization
from engine.models.safetensors_headers import ITEM_BYTES
from engine.models.tensors import grouped_tensors, packed_kind
from engine.planning.shape import ModelShape
from kvcache.layout import KVFormat, KVShape
from kvcache.state_cache import CELLS_PER_SEQUENCE

KIB = 1024
# What MLX's affine quantisation keeps beside the codes of each group: a scale and a bias.
# Source: mlx.core.quantize; 64 is its default group.
GROUP_SIZE = 64
BITS_PER_GROUP = 2 * 16
# Outputs that a CPU reads together: as many as leave no room in the last panel.
PANEL_OUTPUTS = 16
VECTOR_BYTES = 2
CONTEXTS = (2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB)


@dataclass(frozen=True, slots=True)
class Packing:
    """How numbers are kept."""

    name: str
    bits: float
    """Per number, everything that is kept beside the codes included."""

    def bytes_of(self, numbers: int) -> int:
        """Return the bytes of so many numbers, rounded up."""
        return math.ceil(numbers * self.bits / 8)


def affine(bits: int, group_size: int = GROUP_SIZE) -> Packing:
    """Return MLX's affine groups: 4 bits in groups of 64 are 4.5 bits per number."""
    return Packing(f"q{bits}", bits + BITS_PER_GROUP / group_size)


def own_packing(stored: Quantization, *, on_gpu: bool) -> Packing:
    """Return how a device keeps what a checkpoint of 16 bits has packed: a GPU as it is stored, a
    CPU as its kernels read it."""
    name = f"q{stored.bits}" if stored.mode == AFFINE else stored.mode
    shape = (PANEL_OUTPUTS, stored.group_size * PANEL_OUTPUTS)
    tensors = grouped_tensors(shape, stored, "BF16")
    if on_gpu:
        kept = sum(ITEM_BYTES[dtype] * math.prod(its) for dtype, its in tensors.values())
    else:
        kind = packed_kind(shape[0], tensors["scales"][0], stored)
        kept = metal_ext.packed_bytes(shape[1], [kind])
    return Packing(name, 8 * kept / math.prod(shape))


BF16 = Packing("bf16", 16)
Q8 = affine(8)
Q4 = affine(4)
WEIGHT_PACKINGS = (BF16, Q8, Q4)
# From what is stored to what is smallest: weights first, because they can be packed once and for
# all; K and V cost a packing at every step.
STEPS = ((BF16, BF16), (Q8, BF16), (Q8, Q8), (Q4, BF16), (Q4, Q8), (Q4, Q4))


@dataclass(frozen=True, slots=True)
class Resident:
    """What lies in memory while a model serves ``context`` tokens. Bytes."""

    weights: Packing
    kv: Packing
    context: int
    weights_bytes: int
    kv_bytes: int

    states_bytes: int = 0
    """Of all that one sequence's states may take."""

    @property
    def kept_bytes(self) -> int:
        return self.kv_bytes + self.states_bytes

    @property
    def total_bytes(self) -> int:
        """Return the bytes of weights, K and V, and states; activations and caches are not in
        it."""
        return self.weights_bytes + self.kept_bytes


def weights_bytes(shape: ModelShape, packing: Packing) -> int:
    """Return the bytes of all matrices packed alike, the embedding included; norms in 16 bits."""
    return packing.bytes_of(shape.matrix_numbers) + VECTOR_BYTES * shape.vector_numbers


def kv_bytes_per_token(shape: ModelShape, packing: Packing) -> int:
    return packing.bytes_of(shape.kv_numbers_per_token)


def kv_shape(shape: ModelShape) -> KVShape:
    """Return the shape of what is kept of a sequence: K, V and the rows of convolutions in bf16, as
    a GPU keeps them. A CPU's rows of convolutions are twice as wide: 2 % of a state."""
    return shape.spec.kv_shape(KVFormat.BFLOAT16, KVFormat.BFLOAT16)


def cell_bytes(shape: ModelShape) -> int:
    """Return the bytes of the states of one sequence at one position; 0 where it has none."""
    cell = kv_shape(shape).cell
    return 0 if cell is None else cell.cell_bytes


def states_bytes(shape: ModelShape) -> int:
    """Return the bytes of the cells that a sequence may need while it runs."""
    return CELLS_PER_SEQUENCE * cell_bytes(shape)


def resident(shape: ModelShape, weights: Packing, kv: Packing, context: int) -> Resident:
    """Return the bytes of weights, of K and V of ``context`` tokens, of one sequence or of several
    together, and of one sequence's states."""
    return Resident(
        weights,
        kv,
        context,
        weights_bytes(shape, weights),
        context * kv_bytes_per_token(shape, kv),
        states_bytes(shape),
    )
