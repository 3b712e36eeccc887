"""A model's operations over packed weights: a CPU's, five a layer.

Activations and sums are float32, whatever the weights are stored as.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx

import metal_ext
from engine.models.forward import qk_transforms
from engine.models.spec import ModelSpec
from engine.models.stored import StoredMatrix, StoredWeights
from engine.models.tensors import PLAIN_MODES, ModelTensors, Product
from kvcache.views import KVViews

Packed = Callable[[int], None]
"""Called with the bytes of every product that has been packed."""
Codes = tuple[mx.array, mx.array | None, int, int]
"""Scales, biases, bits and group size."""


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
        self._tensors = tensors
        self._layers = list(zip(spec.layers, tensors.layers, strict=True))
        self._products: dict[str, metal_ext.PackedLinear] = {}
        """By the name of their first matrix, as are biases."""
        self._biases: dict[str, mx.array] = {}
        for product in tensors.products:
            self._pack(product, stored)
            packed(self._products[product[0].name].nbytes)
        self._vectors = {its.name: _float32(stored.vector(its)) for its in tensors.vectors}
        self._transforms = qk_transforms(spec, tensors, self._vectors)
        mx.clear_cache()

    def embed(self, token_ids: mx.array) -> mx.array:
        embedding = self._products[self._tensors.embedding.name]
        return metal_ext.packed_rows(token_ids, embedding, self._workers)

    def project(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        layer, tensors = self._layers[number]
        its, name = layer.attention, tensors.queries_keys_values[0].name
        product, bias = self._products[name], None
        if its.qkv_bias:
            bias = mx.broadcast_to(self._biases[name], (len(x), product.outputs))
        norm = self._vectors[tensors.attention_norm.name]
        joined = metal_ext.linear(
            x, product, self._workers, norm=norm, eps=self._eps, residual=bias
        )
        heads = joined.reshape(len(x), -1, its.head_dim)
        queries, keys, values = mx.split(heads, [its.heads, its.heads + its.kv_heads], axis=1)
        return views.append(number, queries, keys, values, self._transforms[number])

    def add_attention(self, number: int, x: mx.array, attended: mx.array) -> mx.array:
        output = self._products[self._layers[number][1].output.name]
        return metal_ext.linear(attended, output, self._workers, residual=x)

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        _, tensors = self._layers[number]
        gate_up = self._products[tensors.gate_up[0].name]
        down = self._products[tensors.down.name]
        norm = self._vectors[tensors.mlp_norm.name]
        return metal_ext.gated_mlp(x, norm, self._eps, gate_up, down, self._workers)

    def norm(self, x: mx.array) -> mx.array:
        norm = self._vectors[self._tensors.norm.name]
        return metal_ext.rms_norm(x, norm, self._eps, self._workers)

    def head(self, states: mx.array) -> mx.array:
        head = self._tensors.head or self._tensors.embedding
        return metal_ext.linear(states, self._products[head.name], self._workers)

    def _pack(self, product: Product, stored: StoredWeights) -> None:
        matrices = [stored.matrix(matrix) for matrix in product]
        self._products[product[0].name] = pack_linear(matrices, self._workers)
        biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
        if biases:
            self._biases[product[0].name] = _float32(mx.concatenate(biases))


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
