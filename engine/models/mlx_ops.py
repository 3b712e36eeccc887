"""A model's operations as MLX has them: on a GPU, and on a CPU for what cannot be packed."""

from dataclasses import dataclass

import mlx.core as mx

from engine.models.forward import LayerViews, Rotations
from engine.models.spec import Attention, LayerSpec, ModelSpec, Rope
from engine.models.stored import StoredMatrix, StoredWeights
from engine.models.tensors import LayerTensors, ModelTensors
from kvcache.backend import NormAndRope


@dataclass(frozen=True, slots=True)
class MlxLayer:
    """The weights of a layer."""

    attention: Attention
    attention_norm: mx.array
    queries: StoredMatrix
    keys: StoredMatrix
    values: StoredMatrix
    query_norm: mx.array | None
    key_norm: mx.array | None
    output: StoredMatrix
    mlp_norm: mx.array
    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix

    def arrays(self) -> list[mx.array]:
        """Return all of them."""
        norms = (self.attention_norm, self.query_norm, self.key_norm, self.mlp_norm)
        matrices = (self.queries, self.keys, self.values, self.output)
        found = [norm for norm in norms if norm is not None]
        for matrix in (*matrices, self.gate, self.up, self.down):
            found += matrix.arrays()
        return found

    def norm_and_rope(self, eps: float) -> NormAndRope | None:
        """Return what one kernel can do of norms and RoPE; None where it is something else."""
        rope = self.attention.rope
        if self.query_norm is None or self.key_norm is None or rope.periods is not None:
            return None
        return NormAndRope(self.query_norm, self.key_norm, eps, rope.base, rope.scale)


class MlxOps:
    """Operations over weights as they are stored, or wider."""

    def __init__(self, spec: ModelSpec, tensors: ModelTensors, stored: StoredWeights) -> None:
        """stored: of these tensors, which are taken and not evaluated."""
        self._eps = spec.norm_eps
        self._embedding = stored.matrix(tensors.embedding)
        own_head = None if tensors.head is None else stored.matrix(tensors.head)
        self._head = own_head or self._embedding
        self._norm = stored.vector(tensors.norm)
        self._layers = [
            _layer(*pair, stored) for pair in zip(spec.layers, tensors.layers, strict=True)
        ]
        self._fused = [layer.norm_and_rope(self._eps) for layer in self._layers]
        ropes = {layer.attention.rope for layer in spec.layers}
        self._periods = {its: mx.array(its.periods) for its in ropes if its.periods is not None}
        self._ropes = ropes
        self.weights = [*self._embedding.arrays(), *([] if own_head is None else own_head.arrays())]
        self.weights += [self._norm, *(array for its in self._layers for array in its.arrays())]

    def rotations(self, positions: mx.array) -> Rotations:
        return dict.fromkeys(self._ropes, positions)

    def embed(self, token_ids: mx.array) -> mx.array:
        its = self._embedding
        if its.packing is None:
            return its.weight[token_ids]
        assert its.scales is not None
        assert its.biases is not None
        return mx.dequantize(
            its.weight[token_ids],
            its.scales[token_ids],
            its.biases[token_ids],
            its.packing.group_size,
            its.packing.bits,
        )

    def project(self, number: int, x: mx.array, turns: Rotations, views: LayerViews) -> mx.array:
        layer, its = self._layers[number], self._layers[number].attention
        normed = self._normed(x, layer.attention_norm)
        tokens = x.shape[0]
        queries = _multiply(normed, layer.queries).reshape(tokens, its.heads, its.head_dim)
        keys = _multiply(normed, layer.keys).reshape(tokens, its.kv_heads, its.head_dim)
        values = _multiply(normed, layer.values).reshape(tokens, its.kv_heads, its.head_dim)
        norms = self._fused[number] if views.fuses_projection else None
        dtype = queries.dtype
        if norms is not None and norms.query_weight.dtype == norms.key_weight.dtype == dtype:
            return views.project(number, queries, keys, values, norms)
        positions = turns[its.rope]
        queries = self._turned(queries, layer.query_norm, its.rope, positions)
        views.append(number, self._turned(keys, layer.key_norm, its.rope, positions), values)
        return queries

    def add_attention(self, number: int, x: mx.array, attended: mx.array) -> mx.array:
        return x + _multiply(attended.reshape(x.shape[0], -1), self._layers[number].output)

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        layer = self._layers[number]
        normed = self._normed(x, layer.mlp_norm)
        gate = _multiply(normed, layer.gate)
        # nn.silu is compiled, and on Linux MLX compiles with g++ while it runs.
        gated = gate * mx.sigmoid(gate) * _multiply(normed, layer.up)
        return x + _multiply(gated, layer.down)

    def norm(self, x: mx.array) -> mx.array:
        return self._normed(x, self._norm)

    def head(self, states: mx.array) -> mx.array:
        return _multiply(states, self._head)

    def _normed(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self._eps)

    def _turned(
        self, heads: mx.array, norm: mx.array | None, rope: Rope, positions: mx.array
    ) -> mx.array:
        """Return ``[T, heads, head_dim]`` after norm and RoPE."""
        # A token is a batch entry here, because RoPE takes one offset per entry.
        x = heads[:, :, None]
        if norm is not None:
            x = self._normed(x, norm)
        if rope.magnitude != 1.0:
            x = x * rope.magnitude
        turned = mx.fast.rope(
            x,
            heads.shape[-1],
            traditional=False,
            base=rope.base if rope.periods is None else None,
            scale=rope.scale,
            offset=positions,
            freqs=self._periods.get(rope),
        )
        return turned.squeeze(2)


def _layer(layer: LayerSpec, tensors: LayerTensors, stored: StoredWeights) -> MlxLayer:
    queries, keys, values = (stored.matrix(its) for its in tensors.queries_keys_values)
    gate, up = (stored.matrix(its) for its in tensors.gate_up)
    query_norm, key_norm = tensors.query_norm, tensors.key_norm
    return MlxLayer(
        attention=layer.attention,
        attention_norm=stored.vector(tensors.attention_norm),
        queries=queries,
        keys=keys,
        values=values,
        query_norm=None if query_norm is None else stored.vector(query_norm),
        key_norm=None if key_norm is None else stored.vector(key_norm),
        output=stored.matrix(tensors.output),
        mlp_norm=stored.vector(tensors.mlp_norm),
        gate=gate,
        up=up,
        down=stored.matrix(tensors.down),
    )


def _multiply(x: mx.array, matrix: StoredMatrix) -> mx.array:
    """Return ``x @ weight.T``, plus the bias where there is one."""
    if matrix.packing is None:
        weight = matrix.weight.T
        return x @ weight if matrix.bias is None else mx.addmm(matrix.bias, x, weight)
    assert matrix.scales is not None
    product = mx.quantized_matmul(
        x,
        matrix.weight,
        matrix.scales,
        matrix.biases,
        transpose=True,
        group_size=matrix.packing.group_size,
        bits=matrix.packing.bits,
    )
    return product if matrix.bias is None else product + matrix.bias
