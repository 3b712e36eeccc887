"""A model's operations over packed weights: a CPU's, five a layer where its kernels know all of it.

Activations and sums are float32, whatever the weights are stored as. What the kernels lack (biases,
heads without norms, tables of RoPE) is computed element by element: a row's bits depend on no other
row.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

import metal_ext
from engine.models.forward import LayerViews, Rotations
from engine.models.spec import Attention, ModelSpec
from engine.models.stored import StoredMatrix, StoredWeights
from engine.models.tensors import (
    PLAIN_MODES,
    LayerTensors,
    ModelTensors,
    Product,
    Vector,
)
from kvcache.backend import NormAndRope

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
        self._norms = [self._norm_and_rope(its.attention, at) for its, at in self._layers]
        # In revolutions. Where one kernel does norms and RoPE, it knows the positions.
        self._turns = {
            its.attention.rope: np.array(its.attention.rope.turns(its.attention.head_dim))
            / (2 * np.pi)
            for its, norms in zip(spec.layers, self._norms, strict=True)
            if norms is None
        }
        mx.clear_cache()

    def rotations(self, positions: mx.array) -> Rotations:
        """Return cosines and sines ``[T, head_dim]`` for each RoPE that MLX computes."""
        found = {}
        for rope, turns in self._turns.items():
            # Whole revolutions are taken off in double precision: MLX's cosine is none of that.
            places = positions.astype(mx.float64)[:, None] * mx.array(turns, dtype=mx.float64)
            angles = ((places - mx.round(places)) * (2 * np.pi)).astype(mx.float32)
            both = mx.concatenate([mx.cos(angles), mx.sin(angles)], axis=-1)
            found[rope] = both if rope.magnitude == 1.0 else both * rope.magnitude
        return found

    def embed(self, token_ids: mx.array) -> mx.array:
        embedding = self._products[self._tensors.embedding.name]
        return metal_ext.packed_rows(token_ids, embedding, self._workers)

    def project(self, number: int, x: mx.array, turns: Rotations, views: LayerViews) -> mx.array:
        layer, tensors = self._layers[number]
        its, name = layer.attention, tensors.queries_keys_values[0].name
        norm = self._vectors[tensors.attention_norm.name]
        joined = metal_ext.linear(x, self._products[name], self._workers, norm=norm, eps=self._eps)
        if its.qkv_bias:
            joined = joined + self._biases[name]
        norms = self._norms[number]
        if norms is not None:
            return views.project_joined(number, joined, norms)
        heads = joined.reshape(len(joined), -1, its.head_dim)
        queries, keys, values = mx.split(heads, [its.heads, its.heads + its.kv_heads], axis=1)
        queries = self._normed(queries, tensors.query_norm)
        keys = self._normed(keys, tensors.key_norm)
        views.append(number, _turned(keys, turns[its.rope]), values)
        return _turned(queries, turns[its.rope])

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

    def _normed(self, heads: mx.array, norm: Vector | None) -> mx.array:
        if norm is None:
            return heads
        rows = heads.reshape(-1, heads.shape[-1])
        normed = metal_ext.rms_norm(rows, self._vectors[norm.name], self._eps, self._workers)
        return normed.reshape(heads.shape)

    def _norm_and_rope(self, attention: Attention, tensors: LayerTensors) -> NormAndRope | None:
        """Return what one kernel does of norms and RoPE; None where they are something else."""
        rope, query_norm, key_norm = attention.rope, tensors.query_norm, tensors.key_norm
        if query_norm is None or key_norm is None or rope.periods is not None:
            return None
        weights = (self._vectors[query_norm.name], self._vectors[key_norm.name])
        return NormAndRope(*weights, self._eps, rope.base, rope.scale)


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


def _turned(heads: mx.array, angles: mx.array) -> mx.array:
    """Return ``[T, heads, head_dim]`` after RoPE. angles: cosines and sines, ``[T, head_dim]``."""
    half = heads.shape[-1] // 2
    low, high = heads[..., :half], heads[..., half:]
    cosines, sines = angles[:, None, :half], angles[:, None, half:]
    return mx.concatenate([low * cosines - high * sines, low * sines + high * cosines], axis=-1)


def _float32(weight: mx.array) -> mx.array:
    wide = weight.astype(mx.float32)
    mx.eval(wide)
    return wide
