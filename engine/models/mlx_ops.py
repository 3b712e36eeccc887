"""A model's operations as MLX has them: a GPU's."""

import mlx.core as mx

from engine.models.forward import LayerViews, Rotations
from engine.models.spec import Attention, ModelSpec, Rope
from engine.models.stored import StoredMatrix, StoredWeights
from engine.models.tensors import LayerTensors, Matrix, ModelTensors, Vector
from kvcache.backend import NormAndRope


class MlxOps:
    """Operations over weights as they are stored."""

    def __init__(self, spec: ModelSpec, tensors: ModelTensors, stored: StoredWeights) -> None:
        """stored: of these tensors, which are taken and not evaluated."""
        self._eps = spec.norm_eps
        self._tensors = tensors
        self._layers = list(zip(spec.layers, tensors.layers, strict=True))
        self._matrices = {its.name: stored.matrix(its) for its in tensors.matrices}
        self._vectors = {its.name: stored.vector(its) for its in tensors.vectors}
        self._fused = [self._norm_and_rope(its.attention, at) for its, at in self._layers]
        self._ropes = {its.attention.rope for its in spec.layers}
        self._periods = {
            rope: mx.array(rope.periods) for rope in self._ropes if rope.periods is not None
        }
        self.weights = [array for its in self._matrices.values() for array in its.arrays()]
        self.weights += self._vectors.values()

    def rotations(self, positions: mx.array) -> Rotations:
        return dict.fromkeys(self._ropes, positions)

    def embed(self, token_ids: mx.array) -> mx.array:
        embedding = self._matrices[self._tensors.embedding.name]
        return embedding.dequantized(token_ids, self._vectors[self._tensors.norm.name].dtype)

    def project(self, number: int, x: mx.array, turns: Rotations, views: LayerViews) -> mx.array:
        layer, tensors = self._layers[number]
        its, tokens = layer.attention, x.shape[0]
        normed = self._normed(x, tensors.attention_norm)
        queries, keys, values = (
            self._multiply(normed, matrix).reshape(tokens, -1, its.head_dim)
            for matrix in tensors.queries_keys_values
        )
        norms = self._fused[number] if views.fuses_projection else None
        dtype = queries.dtype
        if norms is not None and norms.query_weight.dtype == norms.key_weight.dtype == dtype:
            return views.project(number, queries, keys, values, norms)
        positions = turns[its.rope]
        queries = self._turned(queries, tensors.query_norm, its.rope, positions)
        views.append(number, self._turned(keys, tensors.key_norm, its.rope, positions), values)
        return queries

    def add_attention(self, number: int, x: mx.array, attended: mx.array) -> mx.array:
        _, tensors = self._layers[number]
        return x + self._multiply(attended.reshape(x.shape[0], -1), tensors.output)

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        _, tensors = self._layers[number]
        normed = self._normed(x, tensors.mlp_norm)
        gate, up = (self._multiply(normed, matrix) for matrix in tensors.gate_up)
        # nn.silu is compiled, and on Linux MLX compiles with g++ while it runs.
        return x + self._multiply(gate * mx.sigmoid(gate) * up, tensors.down)

    def norm(self, x: mx.array) -> mx.array:
        return self._normed(x, self._tensors.norm)

    def head(self, states: mx.array) -> mx.array:
        return self._multiply(states, self._tensors.head or self._tensors.embedding)

    def _norm_and_rope(self, attention: Attention, tensors: LayerTensors) -> NormAndRope | None:
        """Return what one kernel does of norms and RoPE; None where they are something else."""
        rope, query_norm, key_norm = attention.rope, tensors.query_norm, tensors.key_norm
        if query_norm is None or key_norm is None or rope.periods is not None:
            return None
        weights = (self._vectors[query_norm.name], self._vectors[key_norm.name])
        return NormAndRope(*weights, self._eps, rope.base, rope.scale)

    def _normed(self, x: mx.array, norm: Vector) -> mx.array:
        return mx.fast.rms_norm(x, self._vectors[norm.name], self._eps)

    def _multiply(self, x: mx.array, matrix: Matrix) -> mx.array:
        return _multiply(x, self._matrices[matrix.name])

    def _turned(
        self, heads: mx.array, norm: Vector | None, rope: Rope, positions: mx.array
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
        mode=matrix.packing.mode,
    )
    return product if matrix.bias is None else product + matrix.bias
