"""Computes a model's memory from ``config.json``: weights, K and V, states, and a step's arrays."""

import math
from dataclasses import dataclass
from pathlib import Path

import metal_ext
from engine.config import EngineConfig
from engine.machine import MachineMemory
from engine.models.config import AFFINE, ModelConfig, Quantization
from engine.models.families import read_spec
from engine.models.safetensors_headers import ITEM_BYTES
from engine.models.spec import GatedDeltaNet, Mixer, ModelSpec
from engine.models.tensors import FLOAT32_BYTES, grouped_tensors, model_tensors, packed_kind
from engine.step.sampler import SCORED_ROWS_AT_ONCE
from kvcache.backends.choice import KVBackend
from kvcache.budget import MemoryDemand
from kvcache.layout import KVFormat, KVShape
from kvcache.slots import SLOTS_PER_SEQUENCE

KIB = 1024
# The CPU's kernels pack this many outputs of a matrix in one panel (block of packed weights).
PANEL_OUTPUTS = 16
VECTOR_BYTES = 2
CONTEXTS = (2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB)
# The largest numbers of arrays that a step holds at once, for arrays of two sizes.
HIDDEN_COPIES = 6  # as large as the hidden state
LOGIT_COPIES = 5  # as large as the logits
# Attention of one token splits the earlier tokens into parts of SPLIT_TOKENS. A GPU takes parts of
# SHORT_SPLIT_TOKENS for sequences up to SHORT_ROW_TOKENS (arguments.h and kernels.h in metal_ext).
SPLIT_TOKENS = 256
SHORT_SPLIT_TOKENS, SHORT_ROW_TOKENS = 128, 2048
# With KVBackend.PAGED, copies of K and V exist for at most this many layers at once.
GATHERED_LAYERS = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model, and the count of numbers in its weights."""

    spec: ModelSpec
    matrix_numbers: int
    """The count of numbers in all matrices, the embedding included. Matrices may be quantized."""
    vector_numbers: int
    """The count of numbers in norms, biases and plain matrices, which stay in 16 bits."""
    quantization: Quantization | None

    @property
    def parameters(self) -> int:
        return self.matrix_numbers + self.vector_numbers


def read_shape(path: Path) -> ModelShape:
    """Read ``config.json`` in a folder. Raises CheckpointError, which names the file and field."""
    config = ModelConfig(path)
    spec = read_spec(config)
    tensors = model_tensors(spec, with_head=not spec.tied_embeddings)
    names = tensors.blocks or {each.name for each in tensors.matrices}
    plain = sum(each.outputs * each.inputs for each in tensors.matrices if each.name not in names)
    return ModelShape(
        spec=spec,
        matrix_numbers=tensors.count(2) - plain,
        vector_numbers=tensors.count(1) + plain,
        quantization=config.quantization(tensors.embedding.name),
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """A format in which numbers are stored, such as bf16 or 4 bits."""

    name: str
    bits: float
    """The bits per number, with the bits of scales and biases."""

    def bytes_of(self, numbers: int) -> int:
        return math.ceil(numbers * self.bits / 8)


def own_packing(stored: Quantization, *, on_gpu: bool) -> Packing:
    """Return the packing of a quantized checkpoint's weights in memory. A GPU keeps the packing of
    the files; a CPU has its own packing."""
    name = f"q{stored.bits}" if stored.mode == AFFINE else stored.mode
    shape = (PANEL_OUTPUTS, stored.group_size * PANEL_OUTPUTS)
    tensors = grouped_tensors(shape, stored, "BF16")
    if on_gpu:
        size = sum(ITEM_BYTES[dtype] * math.prod(part) for dtype, part in tensors.values())
    else:
        kind = packed_kind(shape[0], tensors["scales"][0], stored)
        size = metal_ext.packed_bytes(shape[1], [kind])
    return Packing(name, 8 * size / math.prod(shape))


BF16 = Packing("bf16", 16)
# MLX's affine quantization stores a scale and a bias of 16 bits for each group. Its default groups
# have 64 numbers (mlx.core.quantize).
Q8, Q4 = Packing("q8", 8.5), Packing("q4", 4.5)
WEIGHT_PACKINGS = (BF16, Q8, Q4)


@dataclass(frozen=True, slots=True)
class Resident:
    """The memory of a model and one sequence of ``context`` tokens, whose K and V are bf16."""

    weights: Packing
    context: int
    weights_bytes: int
    kv_bytes: int
    states_bytes: int = 0
    """The largest number of bytes that the sequence may have in recurrent states."""

    @property
    def kept_bytes(self) -> int:
        return self.kv_bytes + self.states_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kept_bytes


def weights_bytes(shape: ModelShape, packing: Packing) -> int:
    """Return the bytes of all weights, with matrices in one packing and vectors in 16 bits."""
    return packing.bytes_of(shape.matrix_numbers) + VECTOR_BYTES * shape.vector_numbers


def kv_shape(shape: ModelShape) -> KVShape:
    """Return the shape of a sequence's cache in bf16, as on a GPU. On a CPU, the inputs that
    convolutions keep are float32 instead, which adds 2 % to a state."""
    return shape.spec.kv_shape(KVFormat.BFLOAT16, KVFormat.BFLOAT16)


def resident(shape: ModelShape, weights: Packing, context: int) -> Resident:
    kv = kv_shape(shape)
    return Resident(
        weights,
        context,
        weights_bytes(shape, weights),
        kv.bytes_of(context),
        SLOTS_PER_SEQUENCE * kv.slot_bytes,
    )


def memory_demand(
    spec: ModelSpec,
    config: EngineConfig,
    machine: MachineMemory,
    shape: KVShape,
    kv_backend: KVBackend,
    itemsize: int,
    weights_bytes: int = 0,
) -> MemoryDemand:
    """Return the memory needed beside the cache. An activation has ``itemsize`` bytes."""
    attention = attention_scratch_bytes(spec, config, shape, kv_backend)
    return MemoryDemand(
        machine_bytes=machine.total_bytes,
        available_bytes=machine.available_bytes,
        headroom_bytes=machine.headroom_bytes(config.headroom_bytes),
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes(spec, config, itemsize) + attention,
        mlx_cache_bytes=config.mlx_cache_bytes,
        grammar_bytes=config.grammar_bytes,
        on_gpu=machine.on_gpu,
    )


def activation_bytes(spec: ModelSpec, config: EngineConfig, itemsize: int) -> int:
    """Return an upper bound of the bytes of a step's activations, without attention's partial sums.
    Logits are float32; other numbers take ``itemsize`` bytes."""
    layer_numbers = max(
        layer.mlp.numbers_per_token(spec.hidden_size) + _mixer_numbers(layer.mixer)
        for layer in spec.all_layers
    )
    per_token = HIDDEN_COPIES * spec.hidden_size + layer_numbers
    per_row = LOGIT_COPIES * spec.vocab_size
    rows = max(config.max_num_seqs, SCORED_ROWS_AT_ONCE)
    hidden = config.max_num_batched_tokens * per_token * itemsize
    return hidden + rows * per_row * FLOAT32_BYTES


def _mixer_numbers(mixer: Mixer) -> int:
    """Return an upper bound for the count of a mixer's intermediate numbers for one token."""
    if isinstance(mixer, GatedDeltaNet):
        # A GPU keeps queries, keys and values of a prompt in float32 between two commands.
        return 4 * (mixer.conv_width + mixer.values_width)
    queries = 2 * mixer.heads if mixer.output_gate else mixer.heads
    return 4 * (queries + 2 * mixer.kv_heads) * mixer.head_dim


def attention_scratch_bytes(
    spec: ModelSpec, config: EngineConfig, shape: KVShape, kv_backend: KVBackend
) -> int:
    """Return an upper bound for the bytes of attention's partial sums while all sequences generate.
    With KVBackend.PAGED, add copies of one sequence's K and V in GATHERED_LAYERS layers."""
    longest = config.max_model_len or spec.max_position_embeddings
    short = min(longest, SHORT_ROW_TOKENS)
    of_row = max(-(-longest // SPLIT_TOKENS), -(-short // SHORT_SPLIT_TOKENS))
    splits = config.max_num_seqs * of_row
    # A partial sum has head_dim numbers, and two more to combine it with other partial sums.
    numbers = max(attention.heads * (attention.head_dim + 2) for attention in spec.attentions)
    partial = numbers * FLOAT32_BYTES
    gathered = GATHERED_LAYERS * 2 * longest * max(kv.row_bytes for kv in shape.specs)
    return splits * partial + (gathered if kv_backend is KVBackend.PAGED else 0)
