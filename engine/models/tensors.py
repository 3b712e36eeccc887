"""Which tensors a model has, as its spec says: names, shapes, and what is one product.

Checks of a folder and sizes of weights, stored and packed, follow from the list. Packed is how the
CPU's kernels read them (kernels/cpu/linear.h).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import mlx.core as mx

import metal_ext
from engine.models.config import AFFINE, Quantization
from engine.models.safetensors_headers import CheckpointError, Tensor
from engine.models.spec import LayerSpec, ModelSpec

PREFIX = "model."
"""Of the names of all below the head; a model that was saved without its head has none."""
EMBEDDING = "embed_tokens"
HEAD = "lm_head"
FLOAT_TYPES = ("F32", "BF16", "F16")
DTYPES = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16, "U8": mx.uint8}
# Modes whose numbers are all a bfloat16's: a CPU has them as plain ones.
PLAIN_MODES = ("mxfp8", "nvfp4")
FLOAT32_BYTES = 4

Shapes = dict[str, tuple[int, ...]]
PackingOf = Callable[[str], Quantization | None]
"""How a checkpoint groups the weights of a layer of that name."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weights of a linear layer, or an embedding."""

    name: str
    outputs: int
    inputs: int
    has_bias: bool = False

    def shapes(self) -> Shapes:
        """Return the tensors, unpacked."""
        bias: Shapes = {f"{self.name}.bias": (self.outputs,)} if self.has_bias else {}
        return {f"{self.name}.weight": (self.outputs, self.inputs)} | bias


@dataclass(frozen=True, slots=True)
class Vector:
    """The weights of a norm."""

    name: str
    size: int

    def shapes(self) -> Shapes:
        """Return the tensor."""
        return {f"{self.name}.weight": (self.size,)}


Part = Matrix | Vector
Product = tuple[Matrix, ...]
"""Matrices that read the same rows: a CPU joins them to one, in the order of their outputs."""


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of a layer."""

    attention_norm: Vector
    queries_keys_values: Product
    output: Matrix
    query_norm: Vector | None
    key_norm: Vector | None
    mlp_norm: Vector
    gate_up: Product
    down: Matrix

    @property
    def products(self) -> tuple[Product, ...]:
        """Return all matrices."""
        return self.queries_keys_values, (self.output,), self.gate_up, (self.down,)

    @property
    def parts(self) -> list[Part]:
        """Return all, in the order in which files list them."""
        norms = [norm for norm in (self.query_norm, self.key_norm) if norm is not None]
        found: list[Part] = [self.attention_norm, *self.queries_keys_values, self.output, *norms]
        return [*found, self.mlp_norm, *self.gate_up, self.down]


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model."""

    embedding: Matrix
    layers: tuple[LayerTensors, ...]
    norm: Vector
    head: Matrix | None
    """None: the embedding is the head, or nobody asks for one."""

    @cached_property
    def products(self) -> list[Product]:
        """Return all matrices, by the rows that they read."""
        head = [] if self.head is None else [self.head]
        ends: list[Product] = [(matrix,) for matrix in (self.embedding, *head)]
        return ends + [product for layer in self.layers for product in layer.products]

    @cached_property
    def parts(self) -> list[Part]:
        """Return all, in the order in which files list them."""
        head = [] if self.head is None else [self.head]
        layers = [part for layer in self.layers for part in layer.parts]
        return [self.embedding, *layers, self.norm, *head]

    @property
    def matrices(self) -> list[Matrix]:
        """Return all matrices."""
        return [part for part in self.parts if isinstance(part, Matrix)]

    @property
    def vectors(self) -> list[Vector]:
        """Return all norms."""
        return [part for part in self.parts if isinstance(part, Vector)]

    @cached_property
    def shapes(self) -> Shapes:
        """Return the shape of every tensor, unpacked, by its name."""
        return {name: shape for part in self.parts for name, shape in part.shapes().items()}

    def count(self, dimensions: int) -> int:
        """Return how many numbers all tensors of so many dimensions have: 1 for norms and biases, 2
        for matrices."""
        return sum(math.prod(its) for its in self.shapes.values() if len(its) == dimensions)


def model_tensors(spec: ModelSpec, prefix: str = PREFIX, *, with_head: bool) -> ModelTensors:
    """Return the tensors of a model, by their names on the hub."""
    hidden = spec.hidden_size
    return ModelTensors(
        embedding=Matrix(f"{prefix}{EMBEDDING}", spec.vocab_size, hidden),
        layers=tuple(
            _layer_tensors(layer, hidden, f"{prefix}layers.{number}")
            for number, layer in enumerate(spec.layers)
        ),
        norm=Vector(f"{prefix}norm", hidden),
        head=Matrix(HEAD, spec.vocab_size, hidden) if with_head else None,
    )


def _layer_tensors(layer: LayerSpec, hidden: int, name: str) -> LayerTensors:
    attention, inner = layer.attention, layer.mlp.inner_size
    head = attention.head_dim
    rows, at = attention.heads * head, f"{name}.self_attn"
    kv_rows, bias = attention.kv_heads * head, attention.qkv_bias
    return LayerTensors(
        attention_norm=Vector(f"{name}.input_layernorm", hidden),
        queries_keys_values=(
            Matrix(f"{at}.q_proj", rows, hidden, bias),
            Matrix(f"{at}.k_proj", kv_rows, hidden, bias),
            Matrix(f"{at}.v_proj", kv_rows, hidden, bias),
        ),
        output=Matrix(f"{at}.o_proj", hidden, rows),
        query_norm=Vector(f"{at}.q_norm", head) if attention.qk_norm else None,
        key_norm=Vector(f"{at}.k_norm", head) if attention.qk_norm else None,
        mlp_norm=Vector(f"{name}.post_attention_layernorm", hidden),
        gate_up=(
            Matrix(f"{name}.mlp.gate_proj", inner, hidden),
            Matrix(f"{name}.mlp.up_proj", inner, hidden),
        ),
        down=Matrix(f"{name}.mlp.down_proj", hidden, inner),
    )


# --- a folder's tensors ---------------------------------------------------------------------------


def grouped_tensors(
    shape: tuple[int, ...], packing: Quantization, dtype: str
) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return dtypes and shapes of a matrix as MLX packs it: codes in words of 32 bits; for each
    group a scale and a bias, or a scale of a byte. dtype: of scales and biases."""
    rows, columns = shape
    codes, groups = (rows, columns * packing.bits // 32), (rows, columns // packing.group_size)
    if packing.mode != AFFINE:
        return {"weight": ("U32", codes), "scales": ("U8", groups)}
    return {"weight": ("U32", codes), "scales": (dtype, groups), "biases": (dtype, groups)}


def check_tensor(
    path: Path,
    name: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    packing_of: PackingOf,
) -> None:
    """Check that a folder's files hold a tensor as the model needs it. Raises CheckpointError that
    names file and tensor."""
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{path}: no file holds the tensor {name} that config.json needs")
    layer = name.removesuffix(".weight")
    scales = tensors.get(f"{layer}.scales")
    if scales is None:
        if tensor.dtype not in FLOAT_TYPES or tensor.shape != shape:
            raise CheckpointError(
                f"{path / tensor.file}: {name} is {tensor.dtype} {list(tensor.shape)}, but "
                f"config.json makes it a float of {list(shape)}"
            )
        return
    packing = packing_of(layer)
    if packing is None:
        raise CheckpointError(
            f"{path / scales.file}: {layer}.scales exists, but config.json has no quantization"
        )
    known = packing.mode != AFFINE or scales.dtype in FLOAT_TYPES
    for part, (dtype, part_shape) in grouped_tensors(shape, packing, scales.dtype).items():
        found = tensors.get(f"{layer}.{part}")
        if found is None:
            raise CheckpointError(f"{path}: {layer}.{part} is missing beside {layer}.scales")
        if found.dtype != dtype or found.shape != part_shape or not known:
            raise CheckpointError(
                f"{path / found.file}: {layer}.{part} is {found.dtype} {list(found.shape)}, but "
                f"config.json ({packing.bits} bits in groups of {packing.group_size}) makes it "
                f"{dtype} {list(part_shape)}"
            )


# --- packed for the CPU's kernels -----------------------------------------------------------------

Kind = tuple[int, mx.Dtype, int, int]
"""Outputs; of what dtype numbers or scales are; bits and group size, or 0."""


def packed_bytes(model: ModelTensors, tensors: Mapping[str, Tensor], packing_of: PackingOf) -> int:
    """Return the bytes of all tensors once they are packed. tensors: what the files hold."""
    total = FLOAT32_BYTES * model.count(1)
    for product in model.products:
        kinds = [_kind_of(matrix, tensors, packing_of) for matrix in product]
        total += metal_ext.packed_bytes(product[0].inputs, kinds)
    return total


def packed_kind(outputs: int, scales: str, packing: Quantization) -> Kind:
    """Return how the CPU's kernels are given codes. scales: their dtype."""
    if packing.mode in PLAIN_MODES:
        return outputs, mx.bfloat16, 0, 0
    return outputs, DTYPES[scales], packing.bits, packing.group_size


def _kind_of(matrix: Matrix, tensors: Mapping[str, Tensor], packing_of: PackingOf) -> Kind:
    """Return how the CPU's kernels are given a matrix."""
    scales = tensors.get(f"{matrix.name}.scales")
    if scales is None:
        return matrix.outputs, DTYPES[tensors[f"{matrix.name}.weight"].dtype], 0, 0
    packing = packing_of(matrix.name)
    assert packing is not None, "checked before"
    return packed_kind(matrix.outputs, scales.dtype, packing)
