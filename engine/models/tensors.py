"""Lists the names and shapes of a model's tensors, and the matrices that multiply the same input.

The list serves to check a model folder, and to compute the size of weights as stored in files or as
packed for the CPU's kernels (kernels/cpu/linear.h).
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import mlx.core as mx

import metal_ext
from engine.models.config import AFFINE, PACKINGS, ModelConfig, Quantization
from engine.models.expert_tensors import (
    ExpertMatrix,
    ExpertNames,
    expert_matrices,
    find_expert_names,
)
from engine.models.safetensors_headers import CheckpointError, Tensor
from engine.models.spec import Attention, DenseMlp, GatedDeltaNet, LayerSpec, Mlp, ModelSpec

EMBEDDING = "embed_tokens"
HEAD = "lm_head"
FLOAT_TYPES = ("F32", "BF16", "F16")
DTYPES = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16, "U8": mx.uint8}
# Quantization modes whose numbers are exact in bfloat16. The CPU's kernels get them as bfloat16.
PLAIN_MODES = ("mxfp8", "nvfp4")
FLOAT32_BYTES = 4

Shapes = dict[str, tuple[int, ...]]
PackingOf = Callable[[str], Quantization | None]
"""A function from a layer's name to the layer's quantization, or to None for plain numbers."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The way in which a checkpoint names and stores its tensors."""

    prefix: str = "model."
    """The prefix of all names except ``head``; empty for a model saved without an output head."""
    head: str = HEAD
    zero_centred: bool = False
    """Whether the files store ``weight - 1`` for norms, and ``[width, 1, taps]`` for convolutions
    instead of MLX's ``[width, taps, 1]``."""
    experts: ExpertNames = ExpertNames.STACKED
    joined_deltas: bool = False
    """Whether a delta net's four input matrices are stored as two, as in Qwen3-Next's files."""


NAMINGS = (
    Naming(),
    Naming("model.language_model."),
    Naming("language_model.model.", f"language_model.{HEAD}"),
    Naming(""),
)
"""One Naming each: for a plain model, for the text part of a larger model on the hub, for such a
part saved by MLX's tools, and for a model saved without a head."""


DRAFT_NAMINGS = (Naming("mtp."), Naming("language_model.mtp."))
"""The same for a draft head: on the hub, and saved by MLX's tools."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weights of a linear layer, or an embedding."""

    name: str
    outputs: int
    inputs: int
    has_bias: bool = False
    parts: tuple[int, ...] = ()
    """If set, the file's rows form groups, and a group's parts have these numbers of rows. Reading
    sorts the rows by part: all first parts, then all second parts, and so on."""

    def shapes(self) -> Shapes:
        bias: Shapes = {f"{self.name}.bias": (self.outputs,)} if self.has_bias else {}
        return {f"{self.name}.weight": (self.outputs, self.inputs)} | bias


@dataclass(frozen=True, slots=True)
class Vector:
    """The weights of a norm."""

    name: str
    size: int
    less_one: bool = False
    """Whether the file stores the weights minus 1."""

    def shapes(self) -> Shapes:
        return {f"{self.name}.weight": (self.size,)}


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor that is converted to float32. ``name`` is the tensor's full name in the files."""

    name: str
    shape: tuple[int, ...]

    def shapes(self) -> Shapes:
        return {self.name: self.shape}


AnyMatrix = Matrix | ExpertMatrix
Part = AnyMatrix | Vector | Constant
Product = tuple[Matrix, ...]
"""Matrices that multiply the same input. On a CPU they are joined into one matrix."""
ExpertProduct = tuple[ExpertMatrix, ...]


@dataclass(frozen=True, slots=True)
class DenseTensors:
    """The tensors of a dense MLP."""

    gate_up: Product
    down: Matrix

    @property
    def products(self) -> tuple[Product, ...]:
        return self.gate_up, (self.down,)


@dataclass(frozen=True, slots=True)
class MixtureTensors:
    """The tensors of a mixture of experts."""

    router: Product
    """The router's matrix, and the gate of the shared expert if there is one."""
    gate_up: ExpertProduct
    down: ExpertMatrix
    shared: DenseTensors | None

    @property
    def products(self) -> tuple[Product | ExpertProduct, ...]:
        shared = () if self.shared is None else self.shared.products
        return self.router, self.gate_up, (self.down,), *shared


MlpTensors = DenseTensors | MixtureTensors


@dataclass(frozen=True, slots=True)
class AttentionTensors:
    """The tensors of attention."""

    queries_keys_values: Product
    """The matrices of queries, keys and values. With an output gate, the first matrix has for each
    head the rows of the query, then the rows of the gate."""
    output: Matrix
    query_norm: Vector | None
    key_norm: Vector | None
    sinks: Constant | None

    @property
    def products(self) -> tuple[Product, ...]:
        return self.queries_keys_values, (self.output,)

    @property
    def parts(self) -> list[Part]:
        some = (self.query_norm, self.key_norm, self.sinks)
        others: list[Part] = [part for part in some if part is not None]
        return [*self.queries_keys_values, self.output, *others]


@dataclass(frozen=True, slots=True)
class DeltaTensors:
    """The tensors of a gated delta net."""

    inputs: Product
    """Four matrices, for queries with keys and values, for the output gate, for beta and for the
    decay. With Naming.joined_deltas, the first two are one matrix, and the last two another."""
    conv: Constant
    a_log: Constant
    dt_bias: Constant
    norm: Vector
    output: Matrix

    @property
    def products(self) -> tuple[Product, ...]:
        return self.inputs, (self.output,)

    @property
    def parts(self) -> list[Part]:
        return [*self.inputs, self.conv, self.a_log, self.dt_bias, self.norm, self.output]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of a layer."""

    mixer_norm: Vector
    mixer: AttentionTensors | DeltaTensors
    mixer_post_norm: Vector | None
    mlp_norm: Vector
    mlp: MlpTensors
    mlp_post_norm: Vector | None

    @property
    def products(self) -> tuple[Product | ExpertProduct, ...]:
        return *self.mixer.products, *self.mlp.products

    @property
    def parts(self) -> list[Part]:
        mlp = [matrix for product in self.mlp.products for matrix in product]
        after = [norm for norm in (self.mixer_post_norm, self.mlp_post_norm) if norm is not None]
        return [self.mixer_norm, *self.mixer.parts, self.mlp_norm, *mlp, *after]


@dataclass(frozen=True, slots=True)
class DraftTensors:
    """The tensors of a draft head."""

    join: Matrix
    """Multiplies a token's normed embedding, joined with the normed state of the token before."""
    embedding_norm: Vector
    hidden_norm: Vector
    layer: LayerTensors
    norm: Vector

    @property
    def parts(self) -> list[Part]:
        norms = [self.embedding_norm, self.hidden_norm]
        return [self.join, *norms, *self.layer.parts, self.norm]

    @property
    def shapes(self) -> Shapes:
        return {name: shape for part in self.parts for name, shape in part.shapes().items()}


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model."""

    embedding: Matrix
    layers: tuple[LayerTensors, ...]
    norm: Vector
    head: Matrix | None
    """The output head; None if the embedding is also the head, or the model makes vectors."""
    draft: DraftTensors | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)
    """ModelSpec.blocks by the layers' names in the files."""

    @property
    def all_layers(self) -> tuple[LayerTensors, ...]:
        """Return the layers, and after them the draft head's layer."""
        return self.layers if self.draft is None else (*self.layers, self.draft.layer)

    @cached_property
    def products(self) -> list[Product | ExpertProduct]:
        ends = [self.embedding] if self.head is None else [self.embedding, self.head]
        products: list[Product | ExpertProduct] = [(matrix,) for matrix in ends]
        products += [product for layer in self.all_layers for product in layer.products]
        products += [] if self.draft is None else [(self.draft.join,)]
        if self.blocks:  # a product's matrices may differ in how inputs are rotated
            products = [each[n : n + 1] for each in products for n in range(len(each))]
        return products

    @cached_property
    def parts(self) -> list[Part]:
        """Return all tensors, in the order that is usual in files."""
        head = [] if self.head is None else [self.head]
        layers = [part for layer in self.layers for part in layer.parts]
        draft = [] if self.draft is None else self.draft.parts
        return [self.embedding, *layers, self.norm, *head, *draft]

    @property
    def attentions(self) -> list[AttentionTensors]:
        mixers = (layer.mixer for layer in self.all_layers)
        return [mixer for mixer in mixers if isinstance(mixer, AttentionTensors)]

    @property
    def matrices(self) -> list[AnyMatrix]:
        return [part for part in self.parts if isinstance(part, Matrix | ExpertMatrix)]

    @property
    def vectors(self) -> list[Vector]:
        return [part for part in self.parts if isinstance(part, Vector)]

    @property
    def constants(self) -> list[Constant]:
        return [part for part in self.parts if isinstance(part, Constant)]

    @cached_property
    def shapes(self) -> Shapes:
        shapes = {name: shape for part in self.parts for name, shape in part.shapes().items()}
        rotated = [matrix for matrix in self.matrices if self.blocks.get(matrix.name)]
        return shapes | {f"{matrix.name}.signs": (matrix.inputs,) for matrix in rotated}

    def count(self, dimensions: int) -> int:
        """Count numbers: with ``dimensions`` 2 in matrices and stacks, with 1 in other tensors."""
        stacks = [matrix for matrix in self.matrices if isinstance(matrix, ExpertMatrix)]
        stacked = {name for stack in stacks for name in stack.weights}
        return sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if (name in stacked or (len(shape) == 2 and not name.endswith(".bias")))
            == (dimensions == 2)
        )


def model_tensors(
    spec: ModelSpec,
    naming: Naming = NAMINGS[0],
    draft: Naming = DRAFT_NAMINGS[0],
    *,
    with_head: bool,
) -> ModelTensors:
    hidden, prefix = spec.hidden_size, naming.prefix
    return ModelTensors(
        embedding=Matrix(f"{prefix}{EMBEDDING}", spec.vocab_size, hidden),
        layers=tuple(
            _layer_tensors(layer, hidden, f"{prefix}layers.{number}", naming)
            for number, layer in enumerate(spec.layers)
        ),
        norm=Vector(f"{prefix}norm", hidden, naming.zero_centred),
        head=Matrix(naming.head, spec.vocab_size, hidden) if with_head else None,
        draft=None if spec.draft is None else _draft_tensors(spec.draft, hidden, draft),
        blocks={
            naming.head if name == HEAD else prefix + name.removeprefix(NAMINGS[0].prefix): block
            for name, block in spec.blocks
        },
    )


def _draft_tensors(layer: LayerSpec, hidden: int, naming: Naming) -> DraftTensors:
    prefix = naming.prefix

    def norm(name: str) -> Vector:
        return Vector(f"{prefix}{name}", hidden, naming.zero_centred)

    return DraftTensors(
        join=Matrix(f"{prefix}fc", hidden, 2 * hidden),
        embedding_norm=norm("pre_fc_norm_embedding"),
        hidden_norm=norm("pre_fc_norm_hidden"),
        layer=_layer_tensors(layer, hidden, f"{prefix}layers.0", naming),
        norm=norm("norm"),
    )


def _layer_tensors(layer: LayerSpec, hidden: int, name: str, naming: Naming) -> LayerTensors:
    mixer = layer.mixer

    def norm(place: str) -> Vector:
        return Vector(f"{name}.{place}_layernorm", hidden, naming.zero_centred)

    return LayerTensors(
        mixer_norm=norm("input"),
        mixer=_attention_tensors(mixer, hidden, f"{name}.self_attn", naming)
        if isinstance(mixer, Attention)
        else _delta_tensors(mixer, hidden, f"{name}.linear_attn", naming),
        mixer_post_norm=norm("post_attention") if layer.post_norms else None,
        mlp_norm=norm("pre_feedforward" if layer.post_norms else "post_attention"),
        mlp=_mlp_tensors(layer.mlp, hidden, name, naming),
        mlp_post_norm=norm("post_feedforward") if layer.post_norms else None,
    )


def _attention_tensors(
    attention: Attention, hidden: int, at: str, naming: Naming
) -> AttentionTensors:
    head, less_one = attention.head_dim, naming.zero_centred
    rows, kv_rows, bias = attention.heads * head, attention.kv_heads * head, attention.qkv_bias
    return AttentionTensors(
        queries_keys_values=(
            Matrix(f"{at}.q_proj", 2 * rows if attention.output_gate else rows, hidden, bias),
            Matrix(f"{at}.k_proj", kv_rows, hidden, bias),
            Matrix(f"{at}.v_proj", kv_rows, hidden, bias),
        ),
        output=Matrix(f"{at}.o_proj", hidden, rows, attention.output_bias),
        query_norm=Vector(f"{at}.q_norm", head, less_one) if attention.qk_norm else None,
        key_norm=Vector(f"{at}.k_norm", head, less_one) if attention.qk_norm else None,
        sinks=Constant(f"{at}.sinks", (attention.heads,)) if attention.sinks else None,
    )


def _delta_tensors(net: GatedDeltaNet, hidden: int, at: str, naming: Naming) -> DeltaTensors:
    width, heads = net.conv_width, net.value_heads
    shared = heads // net.key_heads
    values = shared * net.value_dim
    inputs: Product = tuple(
        Matrix(f"{at}.in_proj_{which}", outputs, hidden)
        for which, outputs in zip(("qkv", "z", "b", "a"), net.widths, strict=True)
    )
    if naming.joined_deltas:
        both = width + net.values_width
        parts = (net.key_dim, net.key_dim, values, values)
        inputs = (
            Matrix(f"{at}.in_proj_qkvz", both, hidden, parts=parts),
            Matrix(f"{at}.in_proj_ba", 2 * heads, hidden, parts=(shared, shared)),
        )
    return DeltaTensors(
        inputs=inputs,
        conv=Constant(
            f"{at}.conv1d.weight",
            (width, 1, net.taps) if naming.zero_centred else (width, net.taps, 1),
        ),
        a_log=Constant(f"{at}.A_log", (heads,)),
        dt_bias=Constant(f"{at}.dt_bias", (heads,)),
        norm=Vector(f"{at}.norm", net.value_dim),
        output=Matrix(f"{at}.out_proj", hidden, net.values_width),
    )


def _mlp_tensors(mlp: Mlp, hidden: int, name: str, naming: Naming) -> MlpTensors:
    at = f"{name}.mlp"
    if isinstance(mlp, DenseMlp):
        return _dense_tensors(mlp.inner_size, hidden, at)
    place = f"{at}.router" if mlp.biases else f"{at}.gate"
    router: Product = (Matrix(place, mlp.experts, hidden, mlp.biases),)
    gate_up, down = expert_matrices(
        name, naming.experts, mlp.experts, hidden, mlp.inner_size, biases=mlp.biases
    )
    if mlp.shared_inner_size is None:
        return MixtureTensors(router, gate_up, down, None)
    router += (Matrix(f"{at}.shared_expert_gate", 1, hidden),)
    shared = _dense_tensors(mlp.shared_inner_size, hidden, f"{at}.shared_expert")
    return MixtureTensors(router, gate_up, down, shared)


def _dense_tensors(inner: int, hidden: int, at: str) -> DenseTensors:
    gate, up = (Matrix(f"{at}.{which}_proj", inner, hidden) for which in ("gate", "up"))
    return DenseTensors((gate, up), Matrix(f"{at}.down_proj", hidden, inner))


def naming_of(tensors: Mapping[str, Tensor]) -> Naming:
    known = (naming for naming in NAMINGS if f"{naming.prefix}{EMBEDDING}.weight" in tensors)
    centred = any(
        name.endswith(".conv1d.weight") and each.shape[-1] != 1 for name, each in tensors.items()
    )
    return replace(
        next(known, NAMINGS[0]),
        zero_centred=centred,
        experts=find_expert_names(tensors),
        joined_deltas=any(name.endswith(".in_proj_ba.weight") for name in tensors),
    )


def grouped_tensors(
    shape: tuple[int, ...], packing: Quantization, dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a quantized matrix or stack of matrices: names to dtypes and shapes. In
    affine mode, scales and biases have ``dtype``."""
    *rows, columns = shape
    codes, groups = (*rows, columns * packing.bits // 32), (*rows, columns // packing.group_size)
    if packing.mode != AFFINE:
        return {"weight": ("U32", codes), "scales": ("U8", groups)}
    return {"weight": ("U32", codes), "scales": (dtype, groups), "biases": (dtype, groups)}


def check_tensors(
    config: ModelConfig,
    family: str,
    shapes: Shapes,
    tensors: Mapping[str, Tensor],
    tolerated: Collection[str] = (),
) -> dict[str, Quantization]:
    """Check that ``tensors`` are those that ``shapes`` names, but for the ``tolerated`` ones.
    Return the quantizations of layers. Raises CheckpointError."""
    packings: dict[str, Quantization] = {}
    for name, shape in shapes.items():
        if packing := check_tensor(config, name, shape, tensors):
            packings[name.removesuffix(".weight")] = packing
    for name, tensor in tensors.items():
        of_groups = name.endswith((".scales", ".biases"))
        if not (name in shapes or of_groups or name in tolerated):
            raise CheckpointError(
                f"{config.file.parent / tensor.file}: the tensor {name} has no place in a {family} "
                "model"
            )
    return packings


def check_tensor(
    config: ModelConfig, name: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> Quantization | None:
    """Check a tensor's dtype and shape; return its quantization. If config.json does not name the
    layer, the quantization follows from the shapes, as in mlx-lm. Raises CheckpointError."""
    path, tensor = config.file.parent, tensors.get(name)
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
        return None
    packing = config.quantization(layer)
    if packing is None:
        raise CheckpointError(
            f"{path / scales.file}: {layer}.scales exists, but config.json has no quantization"
        )
    misfit = _misfit(path, layer, shape, packing, tensors)
    if misfit is None:
        return packing
    for other in () if config.names_layer(layer) else PACKINGS:
        if _misfit(path, layer, shape, other, tensors) is None:
            return other
    raise misfit


def _misfit(
    path: Path,
    layer: str,
    shape: tuple[int, ...],
    packing: Quantization,
    tensors: Mapping[str, Tensor],
) -> CheckpointError | None:
    scales = tensors[f"{layer}.scales"]
    known = packing.mode != AFFINE or scales.dtype in FLOAT_TYPES
    for part, (dtype, part_shape) in grouped_tensors(shape, packing, scales.dtype).items():
        tensor = tensors.get(f"{layer}.{part}")
        if tensor is None:
            return CheckpointError(f"{path}: {layer}.{part} is missing beside {layer}.scales")
        if tensor.dtype != dtype or tensor.shape != part_shape or not known:
            return CheckpointError(
                f"{path / tensor.file}: {layer}.{part} is {tensor.dtype} {list(tensor.shape)}, but "
                f"config.json ({packing.bits} bits in groups of {packing.group_size}) makes it "
                f"{dtype} {list(part_shape)}"
            )
    return None


Kind = tuple[int, mx.Dtype, int, int]
"""Outputs, dtype of numbers or scales, bits, group size. For plain numbers the last two are 0."""


def packed_bytes(model: ModelTensors, tensors: Mapping[str, Tensor], packing_of: PackingOf) -> int:
    """Return a model's bytes after packing for the CPU. ``tensors`` has all stored tensors."""
    total = FLOAT32_BYTES * model.count(1)
    for product in model.products:
        kinds = [_kind_of(matrix, tensors, packing_of) for matrix in product]
        count = product[0].experts if isinstance(product[0], ExpertMatrix) else 1
        total += count * metal_ext.packed_bytes(product[0].inputs, kinds)
    return total


def packed_kind(outputs: int, scales: str, packing: Quantization) -> Kind:
    """Return a quantized matrix's Kind. ``scales`` is the dtype of the matrix's scales."""
    if packing.mode in PLAIN_MODES:
        return outputs, mx.bfloat16, 0, 0
    return outputs, DTYPES[scales], packing.bits, packing.group_size


def _kind_of(matrix: AnyMatrix, tensors: Mapping[str, Tensor], packing_of: PackingOf) -> Kind:
    scales = tensors.get(f"{matrix.name}.scales")
    if scales is None:
        weight = tensors[next(iter(matrix.shapes()))]
        return matrix.outputs, DTYPES[weight.dtype], 0, 0
    packing = packing_of(matrix.name)
    assert packing is not None, "checked before"
    return packed_kind(matrix.outputs, scales.dtype, packing)
