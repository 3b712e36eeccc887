"""The forward of any model over a flat token array.

All sequences of a step share one ``x[T, hidden]``, so that every linear layer sees one matrix; only
RoPE (a position per token), attention and states (a sequence per token) tell them apart. What is
computed,
the spec says; how, the operations: ``mlx_ops`` or ``cpu_ops``.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx

import metal_ext
from engine.models.spec import Attention, GatedDeltaNet, ModelSpec
from engine.models.tensors import AttentionTensors, DeltaTensors, ModelTensors
from kvcache.views import KVViews


class Ops(Protocol):
    """A model's weights and operations. ``x`` is ``[T, hidden]``; layers go by number."""

    @property
    def weights(self) -> Sequence[mx.array]:
        """Return the arrays of MLX that every step reads."""

    def embed(self, token_ids: mx.array) -> mx.array:
        """Return the rows of the embedding. token_ids: ``[T]`` int32."""

    def project(self, number: int, x: mx.array, views: KVViews) -> tuple[mx.array, mx.array | None]:
        """Append a layer's keys and values of x. Return its queries ``[T, heads, head_dim]``, and
        the logits of the output's gate in the same shape, where it has one."""

    def recur(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        """Advance a layer's states by x; return their output ``[T, values_width]``."""

    def add_mixed(self, number: int, x: mx.array, mixed: mx.array) -> mx.array:
        """Return x plus a layer's output projection of attention or states."""

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        """Return x plus a layer's MLP of it."""

    def norm(self, x: mx.array) -> mx.array:
        """Return the states after the final norm."""

    def head(self, states: mx.array) -> mx.array:
        """Return the logits ``[T, vocab]``."""


class Forward:
    """A model that is ready to run, on the thread that has loaded it."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        """ops: of a model of that spec."""
        self.ops = ops
        self._layers = list(zip(spec.layers, spec.places, strict=True))

    @property
    def weights(self) -> Sequence[mx.array]:
        """Return the arrays of MLX that every step reads."""
        return self.ops.weights

    def hidden(self, token_ids: mx.array, views: KVViews, rows: mx.array | None) -> mx.array | None:
        """Return the states ``[R, hidden]`` of the given rows after the final norm.

        token_ids: ``[T]`` int32, of the views' rows. rows: ``[R]`` int32 indices into T. With rows
        None only the cache is filled, and None is returned.
        """
        ops, last = self.ops, len(self._layers) - 1
        x = ops.embed(token_ids)
        for number in range(len(self._layers)):
            mixed = self._mixed(number, x, views)
            if number == last and rows is None:
                return None  # and what nobody asks for is not computed
            if number == last:
                x, mixed = x[rows], mixed[rows]  # no later layer needs the others
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
    """Return the transform of queries and keys, of every layer that attends. vectors: float32
    weights of norms by name."""
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
    """Return queries and gates ``[T, heads, head_dim]`` of ``[T, 2 * heads, head_dim]``, where a
    head's lie one behind the other."""
    return projected[:, ::2], projected[:, 1::2]


def conv_by_taps(net: GatedDeltaNet, conv: mx.array) -> mx.array:
    """Return the weights of a stored convolution as kernels read them, ``[taps, conv_width]``."""
    return mx.contiguous(conv.reshape(net.conv_width, net.taps).T)


def gated_delta(
    net: GatedDeltaNet, eps: float, at: DeltaTensors, arrays: Mapping[str, mx.array]
) -> metal_ext.GatedDelta:
    """Return a layer's constants. eps: of its norm. arrays: norms and constants by name, those of
    this layer in float32, and its convolution by taps."""
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
