"""A model's operations over packed weights: a CPU's, five a layer.

Activations and sums are float32, whatever the weights are stored as.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

import metal_ext
from engine.models.forward import qk_transforms
from engine.models.spec import ModelSpec
from engine.models.stored import StoredMatrix, StoredWeights
from engine.models.tensors import PLAIN_MODES, ModelTensors
from kvcache.views import KVViews

Packed = Callable[[int], None]
"""Called with the bytes of every product that has been packed."""
Codes = tuple[mx.array, mx.array | None, int, int]
"""Scales, biases, bits and group size."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The weights of a layer, as the kernels read them."""

    heads: tuple[int, int, int]
    """Of queries, keys and values."""
    attention_norm: mx.array
    queries_keys_values: metal_ext.PackedLinear
    bias: mx.array | None
    """Of queries, keys and values together."""
    transform: metal_ext.QKTransform
    output: metal_ext.PackedLinear
    mlp_norm: mx.array
    gate_up: metal_ext.PackedLinear
    down: metal_ext.PackedLinear


class CpuOps:
    """Operations over packed layers."""

    weights: Sequence[mx.array] = ()

    def __init__(
        self,
        spec: ModelSpec,
        tensors: ModelTensors,
        stored: StoredWeights,
        workers: metal_ext.CpuWorkers,
        packed: Packed,
    ) -> None:
        """Pack all products, one at a time, so that only one's weights are there twice. stored: of
        these tensors, which are taken."""
        self._eps = spec.norm_eps
        self._workers = workers
        # By the name of their first matrix.
        products: dict[str, metal_ext.PackedLinear] = {}
        biases: dict[str, mx.array] = {}
        for product in tensors.products:
            matrices = [stored.matrix(matrix) for matrix in product]
            name = product[0].name
            products[name] = pack_linear(matrices, workers)
            if (bias := _bias(matrices)) is not None:
                biases[name] = bias
            packed(products[name].nbytes)
            del matrices  # before the next ones are read
        vectors = {its.name: _float32(stored.vector(its)) for its in tensors.vectors}
        self._layers = [
            PackedLayer(
                (layer.attention.heads, layer.attention.kv_heads, layer.attention.kv_heads),
                vectors[its.attention_norm.name],
                products[its.queries_keys_values[0].name],
                biases.get(its.queries_keys_values[0].name),
                transform,
                products[its.output.name],
                vectors[its.mlp_norm.name],
                products[its.gate_up[0].name],
                products[its.down.name],
            )
            for layer, its, transform in zip(
                spec.layers, tensors.layers, qk_transforms(spec, tensors, vectors), strict=True
            )
        ]
        self._embedding = products[tensors.embedding.name]
        self._norm = vectors[tensors.norm.name]
        self._head = products[(tensors.head or tensors.embedding).name]
        mx.clear_cache()

    def embed(self, token_ids: mx.array) -> mx.array:
        return metal_ext.packed_rows(token_ids, self._embedding, self._workers)

    def project(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        layer, bias = self._layers[number], None
        if layer.bias is not None:
            bias = mx.broadcast_to(layer.bias, (len(x), layer.queries_keys_values.outputs))
        queries, keys, values = metal_ext.linear_heads(
            x,
            layer.queries_keys_values,
            self._workers,
            layer.heads,
            norm=layer.attention_norm,
            eps=self._eps,
            residual=bias,
        )
        return views.append(number, queries, keys, values, layer.transform)

    def add_attention(self, number: int, x: mx.array, attended: mx.array) -> mx.array:
        return metal_ext.linear(attended, self._layers[number].output, self._workers, residual=x)

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        its = self._layers[number]
        return metal_ext.gated_mlp(x, its.mlp_norm, self._eps, its.gate_up, its.down, self._workers)

    def norm(self, x: mx.array) -> mx.array:
        return metal_ext.rms_norm(x, self._norm, self._eps, self._workers)

    def head(self, states: mx.array) -> mx.array:
        return metal_ext.linear(states, self._head, self._workers)


def _bias(matrices: Sequence[StoredMatrix]) -> mx.array | None:
    """Return the biases of joined matrices, where they have any."""
    parts = [matrix.bias for matrix in matrices if matrix.bias is not None]
    return _float32(mx.concatenate(parts)) if parts else None


def pack_linear(
    matrices: Sequence[StoredMatrix], workers: metal_ext.CpuWorkers
) -> metal_ext.PackedLinear:
    """Pack matrices, plain or in MLX's groups, one behind the other as one.

    Raises ValueError where they cannot be.
    """
    parts = [_codes(matrix) for matrix in matrices]
    weights = [weight for weight, _ in parts]
    return metal_ext.PackedLinear(weights, workers, [codes for _, codes in parts])


def _codes(matrix: StoredMatrix) -> tuple[mx.array, Codes | None]:
    """Return a matrix as it is packed: words with their codes' groups, or plain numbers."""
    packing, scales = matrix.packing, matrix.scales
    if packing is None or packing.mode in PLAIN_MODES:
        return matrix.dequantized(), None
    assert scales is not None
    return matrix.weight, (scales, matrix.biases, packing.bits, packing.group_size)


def _float32(weight: mx.array) -> mx.array:
    wide = weight.astype(mx.float32)
    mx.eval(wide)
    return wide
