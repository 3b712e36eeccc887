"""The forward pass of any model over a flat array of tokens.

All sequences of a step share one ``x[T, hidden]``, so that each linear layer is one product. Only
RoPE, attention and recurrent states treat sequences separately. ModelSpec defines the layers; Ops
(``mlx_ops`` or ``cpu_ops``) computes them.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx

import metal_ext
from engine.models.spec import Attention, GatedDeltaNet, ModelSpec
from engine.models.tensors import AttentionTensors, DeltaTensors, ModelTensors
from kvcache.views import KVViews


class Ops(Protocol):
    """A model's weights and operations. ``x`` is ``[T, hidden]``; ``number`` is a layer's index."""

    @property
    def weights(self) -> Sequence[mx.array]:
        """Return the weights that are MLX arrays, which every step reads."""

    def embed(self, token_ids: mx.array) -> mx.array:
        """Return the rows of the embedding. token_ids: ``[T]`` int32."""

    def project(self, number: int, x: mx.array, views: KVViews) -> tuple[mx.array, mx.array | None]:
        """Append the keys and values of x to the layer's cache. Return the queries ``[T, heads,
        head_dim]``, and the logits of the output's gate in the same shape or None."""

    def recur(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        """Advance the layer's recurrent states by x; return the output ``[T, values_width]``."""

    def add_mixed(self, number: int, x: mx.array, mixed: mx.array) -> mx.array:
        """Return x plus the output projection of ``mixed``, from attention or a recurrence."""

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        """Return x plus the MLP's output for x."""

    def norm(self, x: mx.array) -> mx.array:
        """Return the states after the final norm."""

    def head(self, states: mx.array) -> mx.array:
        """Return the logits ``[T, vocab]``."""


class Forward:
    """A loaded model. Call it on the thread that loaded it."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        self.ops = ops
        self._layers = list(zip(spec.layers, spec.places, strict=True))

    @property
    def weights(self) -> Sequence[mx.array]:
        return self.ops.weights

    def hidden(self, token_ids: mx.array, views: KVViews, rows: mx.array | None) -> mx.array | None:
        """Return the states ``[R, hidden]`` of ``rows`` after the final norm.

        token_ids: ``[T]`` int32. rows: ``[R]`` int32 indices into T; None fills only the cache.
        """
        ops, last = self.ops, len(self._layers) - 1
        x = ops.embed(token_ids)
        for number in range(len(self._layers)):
            mixed = self._mixed(number, x, views)
            if number == last and rows is None:
                return None  # the cache is filled, and no output is wanted
            if number == last:
                x, mixed = x[rows], mixed[rows]  # only the last layer's wanted rows are used
            x = ops.add_mlp(number, ops.add_mixed(number, x, mixed))
        return ops.norm(x)

    def _mixed(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        layer, place = self._layers[number]
        if not isinstance(layer.mixer, Attention):
            return self.ops.recur(number, x, views)
        queries, gate = self.ops.project(number, x, views)
        attended = views.attend(place, queries, layer.mixer.scale)
        return attended if gate is None else attended * mx.sigmoid(gate)

    def head(self, states: mx.array) -> mx.array:
        """Return the logits ``[R, vocab]``."""
        return self.ops.head(states)


def qk_transforms(
    spec: ModelSpec, tensors: ModelTensors, vectors: Mapping[str, mx.array]
) -> list[metal_ext.QKTransform]:
    """Return the norms and RoPE of each attention layer. vectors: float32 norms by name."""
    ropes = {
        (its.rope, its.head_dim): metal_ext.RopeTable(
            its.rope.frequencies(its.head_dim), its.rope.magnitude
        )
        for its in spec.attentions
    }
    places = [layer.mixer for layer in tensors.layers if isinstance(layer.mixer, AttentionTensors)]
    transforms = []
    for attention, at in zip(spec.attentions, places, strict=True):
        norms = None
        if at.query_norm is not None and at.key_norm is not None:
            norms = (vectors[at.query_norm.name], vectors[at.key_norm.name], spec.norm_eps)
        transforms.append(metal_ext.QKTransform(norms, ropes[attention.rope, attention.head_dim]))
    return transforms


def split_gate(projected: mx.array) -> tuple[mx.array, mx.array]:
    """Split ``[T, 2 * heads, head_dim]``, where queries and gates alternate by head."""
    return projected[:, ::2], projected[:, 1::2]


def conv_by_taps(net: GatedDeltaNet, conv: mx.array) -> mx.array:
    """Transpose a convolution's stored weights to ``[taps, conv_width]``."""
    return mx.contiguous(conv.reshape(net.conv_width, net.taps).T)


def gated_delta(
    net: GatedDeltaNet, eps: float, at: DeltaTensors, arrays: Mapping[str, mx.array]
) -> metal_ext.GatedDelta:
    """Return a layer's constants. arrays: float32 tensors by name, with conv from conv_by_taps."""
    return metal_ext.GatedDelta(
        key_heads=net.key_heads,
        value_heads=net.value_heads,
        key_dim=net.key_dim,
        value_dim=net.value_dim,
        conv=arrays[at.conv.name],
        a_log=arrays[at.a_log.name],
        dt_bias=arrays[at.dt_bias.name],
        norm=arrays[at.norm.name],
        eps=eps,
    )
