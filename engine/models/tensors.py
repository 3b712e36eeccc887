"""Which tensors a model has, as its spec says: names, shapes, and what is one product.

Checks of a folder and sizes of weights, stored and packed, follow from the list. Packed is how the
CPU's kernels read them (kernels/cpu/linear.h): 16 outputs make a panel, numbers are filled up to 32
inputs, and float16 is kept as float32.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.models.config import Quantization
from engine.models.safetensors_headers import CheckpointError, Tensor
from engine.models.spec import LayerSpec, ModelSpec

PREFIX = "model."
"""Of the names of all below the head; a model that was saved without its head has none."""
EMBEDDING = "embed_tokens"
HEAD = "lm_head"
FLOAT_TYPES = ("F32", "BF16", "F16")
PANEL_OUTPUTS = 16
INPUT_STEP = 32
GROUP_SIZES = (32, 64, 128)
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


def grouped_shapes(shape: tuple[int, ...], packing: Quantization) -> dict[str, tuple[int, int]]:
    """Return a matrix as MLX packs it: codes in words of 32 bits, a scale and a bias for each
    group."""
    rows, columns = shape
    groups = (rows, columns // packing.group_size)
    return {"weight": (rows, columns * packing.bits // 32), "scales": groups, "biases": groups}


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
    for part, part_shape in grouped_shapes(shape, packing).items():
        dtype = scales.dtype if part != "weight" else "U32"
        found = tensors.get(f"{layer}.{part}")
        if found is None:
            raise CheckpointError(f"{path}: {layer}.{part} is missing beside {layer}.scales")
        if found.dtype != dtype or found.shape != part_shape or scales.dtype not in FLOAT_TYPES:
            raise CheckpointError(
                f"{path / found.file}: {layer}.{part} is {found.dtype} {list(found.shape)}, but "
                f"config.json ({packing.bits} bits in groups of {packing.group_size}) makes it "
                f"{dtype} {list(part_shape)}"
            )


# --- packed for the CPU's kernels -----------------------------------------------------------------

Kind = tuple[str, Quantization | None]
"""Of what dtype the numbers are, or scales and biases where there are groups."""


def packed_bytes(
    model: ModelTensors, tensors: Mapping[str, Tensor], packing_of: PackingOf
) -> int | None:
    """Return the bytes of all tensors once they are packed; None where a layer cannot be.

    tensors: what the files hold.
    """
    total = FLOAT32_BYTES * model.count(1)
    for product in model.products:
        kinds = {_kind_of(matrix.name, tensors, packing_of) for matrix in product}
        filled = all(matrix.outputs % PANEL_OUTPUTS == 0 for matrix in product[:-1])
        if len(kinds) > 1 or not filled:
            return None
        (kind,) = kinds
        if kind[1] is not None and kind[1].group_size not in GROUP_SIZES:
            return None
        total += sum(_panel_bytes(matrix, kind) for matrix in product)
    return total


def _kind_of(layer: str, tensors: Mapping[str, Tensor], packing_of: PackingOf) -> Kind:
    scales = tensors.get(f"{layer}.scales")
    if scales is None:
        return tensors[f"{layer}.weight"].dtype, None
    return scales.dtype, packing_of(layer)


def _panel_bytes(matrix: Matrix, kind: Kind) -> int:
    outputs, inputs = _rounded_up(matrix.outputs, PANEL_OUTPUTS), matrix.inputs
    dtype, packing = kind
    number = 2 if dtype == "BF16" else FLOAT32_BYTES
    if packing is None:
        return outputs * _rounded_up(inputs, INPUT_STEP) * number
    groups = inputs // packing.group_size
    return outputs * (inputs * packing.bits // 8 + groups * 2 * number)


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step
