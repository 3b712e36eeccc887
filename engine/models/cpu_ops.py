"""A model's operations on a CPU, with rotated inputs or without. The weights are packed for quire's
own kernels. Activations and sums are float32, whatever the dtype of the weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

import metal_ext
from engine.models.expert_tensors import ExpertMatrix
from engine.models.forward import (
    conv_by_taps,
    gated_delta,
    qk_transforms,
    softmaxes,
    split_gate,
)
from engine.models.mlx_ops import MlxOps
from engine.models.spec import Attention, DenseMlp, Experts, Gate, GatedDeltaNet, Mlp, ModelSpec
from engine.models.stored import StoredMatrix, StoredWeights
from engine.models.tensors import (
    PLAIN_MODES,
    AttentionTensors,
    DeltaTensors,
    DenseTensors,
    DraftTensors,
    Matrix,
    MixtureTensors,
    MlpTensors,
    ModelTensors,
    Product,
    Vector,
)
from kvcache.views import KVViews


@dataclass(frozen=True, slots=True)
class PackedDense:
    """The packed weights of a dense MLP."""

    gate_up: metal_ext.PackedLinear
    down: metal_ext.PackedLinear

    gate: Gate = Gate.SILU

    def added(
        self,
        x: mx.array,
        norm: mx.array,
        eps: float,
        workers: metal_ext.CpuWorkers,
        post_norm: mx.array | None,
    ) -> mx.array:
        output = metal_ext.gated_mlp(
            x,
            norm,
            eps,
            self.gate_up,
            self.down,
            workers,
            gate=self.gate.value,
            adds=post_norm is None,
        )
        if post_norm is None:
            return output
        return metal_ext.rms_norm(output, post_norm, eps, workers, residual=x)


@dataclass(frozen=True, slots=True)
class PackedMixture:
    """The packed weights of a mixture of experts."""

    spec: Experts
    router: metal_ext.PackedLinear
    """The router's matrix, joined with the gate of the shared expert if there is one."""
    gate_up: metal_ext.PackedExperts
    down: metal_ext.PackedExperts
    shared: PackedDense | None
    biases: tuple[mx.array, mx.array, mx.array] | None
    """The biases of the router, of gate and up, and of down, of all experts."""

    def added(
        self,
        x: mx.array,
        norm: mx.array,
        eps: float,
        workers: metal_ext.CpuWorkers,
        post_norm: mx.array | None,
    ) -> mx.array:
        assert post_norm is None, "no family has mixtures with such norms"
        return metal_ext.mixture_mlp(
            x,
            norm,
            eps,
            self.router,
            self.gate_up,
            self.down,
            self.spec.chosen,
            self.spec.normalised,
            None if self.shared is None else (self.shared.gate_up, self.shared.down),
            workers,
            gate=self.spec.gate.value,
            biases=self.biases,
        )


PackedMlp = PackedDense | PackedMixture


Packed = Callable[[int], None]
"""A function that is called with the size in bytes of each packed product (joined matrices)."""
Codes = tuple[mx.array, mx.array | None, int, int]
"""The scales, biases, bits and group size of a quantized matrix."""


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """The packed weights of an attention layer."""

    heads: tuple[int, int, int]
    """The numbers of query, key and value heads. With a gate, query heads count twice."""
    gated: bool
    queries_keys_values: metal_ext.PackedLinear
    bias: mx.array | None
    transform: metal_ext.QKTransform
    output: metal_ext.PackedLinear
    output_bias: mx.array | None


@dataclass(frozen=True, slots=True)
class PackedDelta:
    """The packed weights of a gated delta net."""

    inputs: metal_ext.PackedLinear
    ends: tuple[int, ...]
    """The indices where parts of an output row end: queries with keys and values, gate, beta."""
    delta: metal_ext.GatedDelta
    output: metal_ext.PackedLinear
    output_bias: None = None


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The packed weights of a layer."""

    mixer_norm: mx.array
    mixer: PackedAttention | PackedDelta
    mixer_post_norm: mx.array | None
    mlp_norm: mx.array
    mlp: PackedMlp
    mlp_post_norm: mx.array | None


@dataclass(frozen=True, slots=True)
class PackedDraft:
    """The packed weights of the head for drafts, without those of its layer."""

    join: metal_ext.PackedLinear
    embedding_norm: mx.array
    hidden_norm: mx.array
    norm: mx.array

    @classmethod
    def of(
        cls,
        at: DraftTensors | None,
        products: Mapping[str, metal_ext.PackedLinear],
        vectors: Mapping[str, mx.array],
    ) -> "PackedDraft | None":
        """Return None for a model without such a head."""
        if at is None:
            return None
        norms = (at.embedding_norm, at.hidden_norm, at.norm)
        return cls(products[at.join.name], *(vectors[norm.name] for norm in norms))


class CpuOps:
    """Implements Ops (forward.py) on a CPU."""

    weights: Sequence[mx.array] = ()

    def __init__(
        self,
        spec: ModelSpec,
        tensors: ModelTensors,
        stored: StoredWeights,
        workers: metal_ext.CpuWorkers,
        packed: Packed,
    ) -> None:
        """Take all weights out of ``stored`` and pack them, a product at a time to save memory."""
        self._eps, self._embedding_scale = spec.norm_eps, spec.embedding_scale
        self._workers, self._places = workers, spec.places
        routers = _routers(tensors)
        # These dicts are keyed by the name of the first matrix of each product.
        products: dict[str, metal_ext.PackedLinear] = {}
        stacks: dict[str, metal_ext.PackedExperts] = {}
        biases: dict[str, mx.array] = {}
        for product in tensors.products:
            matrices = [stored.matrix(matrix) for matrix in product]
            name = product[0].name
            if isinstance(product[0], ExpertMatrix):
                stacks[name] = pack_experts(matrices, workers)
                packed(stacks[name].nbytes)
            else:
                products[name] = pack_linear(matrices, workers, exact=name in routers)
                packed(products[name].nbytes)
            if (bias := _bias(matrices)) is not None:
                biases[name] = bias
            del matrices  # free the memory before more weights are read
        vectors = _vectors(spec, tensors, stored)
        transforms = iter(qk_transforms(spec, tensors, vectors))
        self.softmaxes = softmaxes(spec, tensors, vectors)

        def packed_mixer(
            mixer: Attention | GatedDeltaNet, at: AttentionTensors | DeltaTensors
        ) -> PackedAttention | PackedDelta:
            output = products[at.output.name]
            if isinstance(at, DeltaTensors):
                assert isinstance(mixer, GatedDeltaNet)
                ends = accumulate(mixer.widths[:-1])
                vectors[at.conv.name] = conv_by_taps(mixer, vectors[at.conv.name])
                delta = gated_delta(mixer, spec.norm_eps, at, vectors)
                return PackedDelta(products[at.inputs[0].name], tuple(ends), delta, output)
            assert isinstance(mixer, Attention)
            name = at.queries_keys_values[0].name
            return PackedAttention(
                (mixer.heads * (1 + mixer.output_gate), mixer.kv_heads, mixer.kv_heads),
                mixer.output_gate,
                products[name],
                biases.get(name),
                next(transforms),
                output,
                biases.get(at.output.name),
            )

        self._layers = [
            PackedLayer(
                vectors[at.mixer_norm.name],
                packed_mixer(layer.mixer, at.mixer),
                None if at.mixer_post_norm is None else vectors[at.mixer_post_norm.name],
                vectors[at.mlp_norm.name],
                _packed_mlp(layer.mlp, at.mlp, products, stacks, biases),
                None if at.mlp_post_norm is None else vectors[at.mlp_post_norm.name],
            )
            for layer, at in zip(spec.all_layers, tensors.all_layers, strict=True)
        ]
        self._draft = PackedDraft.of(tensors.draft, products, vectors)
        self._embedding, self._norm = products[tensors.embedding.name], vectors[tensors.norm.name]
        self._head = products[(tensors.head or tensors.embedding).name]
        mx.clear_cache()

    def embed(self, token_ids: mx.array) -> mx.array:
        rows = metal_ext.packed_rows(token_ids, self._embedding, self._workers)
        return rows if self._embedding_scale == 1 else self._embedding_scale * rows

    def project(self, number: int, x: mx.array, views: KVViews) -> tuple[mx.array, mx.array | None]:
        layer, bias = self._layers[number], None
        attention = layer.mixer
        assert isinstance(attention, PackedAttention)
        if attention.bias is not None:
            bias = mx.broadcast_to(attention.bias, (len(x), attention.queries_keys_values.outputs))
        queries, keys, values = metal_ext.linear_heads(
            x,
            attention.queries_keys_values,
            self._workers,
            attention.heads,
            norm=layer.mixer_norm,
            eps=self._eps,
            residual=bias,
        )
        gate = None
        if attention.gated:
            queries, gate = split_gate(queries)
        return views.append(self._places[number], queries, keys, values, attention.transform), gate

    def recur(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        layer = self._layers[number]
        net = layer.mixer
        assert isinstance(net, PackedDelta)
        projected = metal_ext.linear(
            x, net.inputs, self._workers, norm=layer.mixer_norm, eps=self._eps
        )
        qkv, z, b, a = mx.split(projected, net.ends, axis=1)
        return views.recur(self._places[number], qkv, z, a, b, net.delta)

    def add_mixed(self, number: int, x: mx.array, mixed: mx.array) -> mx.array:
        layer = self._layers[number]
        mixer, post_norm = layer.mixer, layer.mixer_post_norm
        if post_norm is None:
            residual = x if mixer.output_bias is None else x + mixer.output_bias
            return metal_ext.linear(mixed, mixer.output, self._workers, residual=residual)
        assert mixer.output_bias is None, "no family has both"
        output = metal_ext.linear(mixed, mixer.output, self._workers)
        return metal_ext.rms_norm(output, post_norm, self._eps, self._workers, residual=x)

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        layer = self._layers[number]
        return layer.mlp.added(x, layer.mlp_norm, self._eps, self._workers, layer.mlp_post_norm)

    def norm(self, x: mx.array) -> mx.array:
        return metal_ext.rms_norm(x, self._norm, self._eps, self._workers)

    def head(self, states: mx.array) -> mx.array:
        return metal_ext.linear(states, self._head, self._workers)

    def join(self, token_ids: mx.array, before: mx.array) -> mx.array:
        draft, eps, workers = self._draft, self._eps, self._workers
        assert draft is not None
        embedded = metal_ext.rms_norm(self.embed(token_ids), draft.embedding_norm, eps, workers)
        states = metal_ext.rms_norm(before, draft.hidden_norm, eps, workers)
        return metal_ext.linear(mx.concatenate([embedded, states], axis=1), draft.join, workers)

    def draft_norm(self, x: mx.array) -> mx.array:
        assert self._draft is not None
        return metal_ext.rms_norm(x, self._draft.norm, self._eps, self._workers)


class RotatedCpuOps(MlxOps):
    """Implements Ops (forward.py) on a CPU, for a model with rotated inputs. Each matrix is packed
    alone: matrices that multiply the same input may differ in its rotation."""

    rotated_dtype = mx.float32

    def pack(self, workers: metal_ext.CpuWorkers, packed: Packed) -> "RotatedCpuOps":
        """Pack one matrix at a time, to save memory."""
        mx.eval(self._vectors)
        self.weights = []  # they would keep what the files have in memory
        self._workers = workers
        self._packed: dict[str, metal_ext.PackedLinear] = {}
        for name in list(self._matrices):
            self._packed[name] = pack_linear([self._matrices.pop(name)], workers)
            packed(self._packed[name].nbytes)
        mx.clear_cache()
        return self

    def _rows(self, token_ids: mx.array, matrix: Matrix) -> mx.array:
        return metal_ext.packed_rows(token_ids, self._packed[matrix.name], self._workers)

    def _gated_product(self, x: mx.array, gate_up: Product, kind: Gate) -> mx.array:
        gate, up = self._multiply_each(x, gate_up)
        assert kind is Gate.SILU, "no family with rotated inputs has another gate"
        return gate * mx.sigmoid(gate) * up

    def _normed(self, x: mx.array, norm: Vector) -> mx.array:
        return metal_ext.rms_norm(x, self._vectors[norm.name], self._eps, self._workers)

    def _product(self, x: mx.array, matrix: Matrix) -> mx.array:
        return metal_ext.linear(x, self._packed[matrix.name], self._workers)


def _packed_mlp(
    mlp: Mlp,
    tensors: MlpTensors,
    products: Mapping[str, metal_ext.PackedLinear],
    stacks: Mapping[str, metal_ext.PackedExperts],
    biases: Mapping[str, mx.array],
) -> PackedMlp:
    def dense(mlp_tensors: DenseTensors, gate: Gate = Gate.SILU) -> PackedDense:
        gate_up, down = mlp_tensors.gate_up[0].name, mlp_tensors.down.name
        return PackedDense(products[gate_up], products[down], gate)

    if isinstance(tensors, DenseTensors):
        assert isinstance(mlp, DenseMlp)
        return dense(tensors, mlp.gate)
    assert isinstance(mlp, Experts)
    router, gate_up, down = tensors.router[0].name, tensors.gate_up[0].name, tensors.down.name
    return PackedMixture(
        mlp,
        products[router],
        stacks[gate_up],
        stacks[down],
        None if tensors.shared is None else dense(tensors.shared),
        (biases[router], biases[gate_up], biases[down]) if mlp.biases else None,
    )


def _vectors(spec: ModelSpec, tensors: ModelTensors, stored: StoredWeights) -> dict[str, mx.array]:
    """Return the weights of norms, and the constants, by name."""
    vectors = {each.name: stored.vector(each) for each in tensors.vectors}
    vectors = {name: _float32(each) + spec.norm_offset for name, each in vectors.items()}
    mx.eval(vectors)
    return vectors | {each.name: _float32(stored.constant(each)) for each in tensors.constants}


def _routers(tensors: ModelTensors) -> set[str]:
    """Return the names of the matrices that choose experts. Their inputs must stay exact, because
    rounding would change the choice."""
    mlps = (layer.mlp for layer in tensors.all_layers)
    return {mlp.router[0].name for mlp in mlps if isinstance(mlp, MixtureTensors)}


def _bias(matrices: Sequence[StoredMatrix]) -> mx.array | None:
    parts = [matrix.bias for matrix in matrices if matrix.bias is not None]
    return _float32(mx.concatenate(parts, axis=-1)) if parts else None


def pack_linear(
    matrices: Sequence[StoredMatrix], workers: metal_ext.CpuWorkers, *, exact: bool = False
) -> metal_ext.PackedLinear:
    """Pack matrices as one matrix. With ``exact``, inputs are never rounded. Raises ValueError."""
    weights, codes = zip(*map(_codes, matrices), strict=True)
    return metal_ext.PackedLinear(list(weights), workers, list(codes), exact)


def pack_experts(
    matrices: Sequence[StoredMatrix], workers: metal_ext.CpuWorkers
) -> metal_ext.PackedExperts:
    weights, codes = zip(*map(_codes, matrices), strict=True)
    return metal_ext.PackedExperts(list(weights), workers, list(codes))


def _codes(matrix: StoredMatrix) -> tuple[mx.array, Codes | None]:
    """Return a quantized matrix's packed words and Codes, or a plain matrix's numbers and None."""
    packing, scales = matrix.packing, matrix.scales
    if packing is None or packing.mode in PLAIN_MODES:
        return matrix.dequantized(), None
    assert scales is not None
    return matrix.weight, (scales, matrix.biases, packing.bits, packing.group_size)


def _float32(weight: mx.array) -> mx.array:
    wide = weight.astype(mx.float32)
    mx.eval(wide)
    return wide
