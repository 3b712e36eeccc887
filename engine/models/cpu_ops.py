"""A model's operations over packed weights: a CPU's, five a layer where its kernels know all of it.

Activations and sums are float32, whatever the weights are stored as. What the kernels lack (biases,
heads without norms) MLX computes, element by element: a row's bits depend on no other row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

import metal_ext
from engine.models.forward import LayerViews, Rotations
from engine.models.spec import Attention, LayerSpec, ModelSpec
from engine.models.stored import StoredMatrix, StoredWeights
from engine.models.tensors import LayerTensors, ModelTensors, Product, Vector
from kvcache.backend import NormAndRope

Packed = Callable[[int], None]
"""Called with the bytes of every product that has been packed."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer, its products joined where they read the same rows. Vectors are float32."""

    attention: Attention
    attention_norm: mx.array
    queries_keys_values: metal_ext.PackedLinear
    bias: mx.array | None
    """Of queries, keys and values."""
    norms: NormAndRope | None
    """None: RoPE alone."""
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
        """Pack all layers, one at a time, so that only one layer's weights are there twice. stored:
        of these tensors, which are taken."""
        packer = _Packer(stored, workers, packed)
        self._eps = spec.norm_eps
        self._workers = workers
        self._embedding, _ = packer.joined((tensors.embedding,))
        own_head = None if tensors.head is None else packer.joined((tensors.head,))[0]
        self._head = own_head or self._embedding
        self._norm = packer.vector(tensors.norm)
        self._layers = [
            packer.layer(its, parts, self._eps)
            for its, parts in zip(spec.layers, tensors.layers, strict=True)
        ]
        # In revolutions. Where there are norms, one kernel does both, and knows the positions.
        self._turns = {
            its.attention.rope: np.array(its.attention.rope.turns(its.attention.head_dim))
            / (2 * np.pi)
            for its in spec.layers
            if not its.attention.qk_norm
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
        return metal_ext.packed_rows(token_ids, self._embedding, self._workers)

    def project(self, number: int, x: mx.array, turns: Rotations, views: LayerViews) -> mx.array:
        layer = self._layers[number]
        joined = metal_ext.linear(
            x,
            layer.queries_keys_values,
            self._workers,
            norm=layer.attention_norm,
            eps=self._eps,
        )
        if layer.bias is not None:
            joined = joined + layer.bias
        if layer.norms is not None:
            return views.project_joined(number, joined, layer.norms)
        its = layer.attention
        heads = joined.reshape(len(joined), -1, its.head_dim)
        turned = _turned(heads[:, : its.heads + its.kv_heads], turns[its.rope])
        keys, values = turned[:, its.heads :], heads[:, its.heads + its.kv_heads :]
        views.append(number, keys, values)
        return turned[:, : its.heads]

    def add_attention(self, number: int, x: mx.array, attended: mx.array) -> mx.array:
        return metal_ext.linear(attended, self._layers[number].output, self._workers, residual=x)

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        its = self._layers[number]
        return metal_ext.gated_mlp(x, its.mlp_norm, self._eps, its.gate_up, its.down, self._workers)

    def norm(self, x: mx.array) -> mx.array:
        return metal_ext.rms_norm(x, self._norm, self._eps, self._workers)

    def head(self, states: mx.array) -> mx.array:
        return metal_ext.linear(states, self._head, self._workers)


class _Packer:
    """Takes stored weights, and packs them."""

    def __init__(
        self, stored: StoredWeights, workers: metal_ext.CpuWorkers, packed: Packed
    ) -> None:
        self._stored = stored
        self._workers = workers
        self._packed = packed

    def layer(self, spec: LayerSpec, tensors: LayerTensors, eps: float) -> PackedLayer:
        """Pack a layer."""
        joined, bias = self.joined(tensors.queries_keys_values)
        return PackedLayer(
            attention=spec.attention,
            attention_norm=self.vector(tensors.attention_norm),
            queries_keys_values=joined,
            bias=bias,
            norms=self._norms(spec.attention, tensors, eps),
            output=self.joined((tensors.output,))[0],
            mlp_norm=self.vector(tensors.mlp_norm),
            gate_up=self.joined(tensors.gate_up)[0],
            down=self.joined((tensors.down,))[0],
        )

    def joined(self, product: Product) -> tuple[metal_ext.PackedLinear, mx.array | None]:
        """Return the matrices as one, and their biases, where they have any, as one."""
        matrices = [self._stored.matrix(matrix) for matrix in product]
        layer = pack_linear(matrices, self._workers)
        self._packed(layer.nbytes)
        biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
        return layer, _float32(mx.concatenate(biases)) if biases else None

    def vector(self, vector: Vector) -> mx.array:
        """Return a norm's weights."""
        return _float32(self._stored.vector(vector))

    def _norms(self, attention: Attention, tensors: LayerTensors, eps: float) -> NormAndRope | None:
        if tensors.query_norm is None or tensors.key_norm is None:
            return None
        rope = attention.rope
        assert rope.periods is None, "such a model is not packed"
        weights = (self.vector(tensors.query_norm), self.vector(tensors.key_norm))
        return NormAndRope(*weights, eps, rope.base, rope.scale)


def pack_linear(
    matrices: Sequence[StoredMatrix], workers: metal_ext.CpuWorkers
) -> metal_ext.PackedLinear:
    """Pack matrices, plain or in MLX's groups, one behind the other as one.

    Raises ValueError where they cannot be.
    """
    codes = [
        (its.scales, its.biases, its.packing.bits, its.packing.group_size)
        for its in matrices
        if its.scales is not None and its.biases is not None and its.packing is not None
    ]
    if codes and len(codes) < len(matrices):
        raise ValueError("some of the layers are packed by their checkpoint, and some are not")
    return metal_ext.PackedLinear([its.weight for its in matrices], workers, codes)


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
