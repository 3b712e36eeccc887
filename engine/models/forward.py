"""The forward pass of any model over a flat array of tokens.

The tokens of all sequences are the rows of one array ``x[T, hidden]``, so that each linear layer is
one product. Only RoPE, attention and recurrent states treat sequences separately. ModelSpec defines
the layers. Ops (``mlx_ops`` or ``cpu_ops``) computes each layer.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx

import metal_ext
from engine.models.spec import Attention, GatedDeltaNet, ModelSpec
from engine.models.tensors import DeltaTensors, ModelTensors
from kvcache.views import KVViews


class Ops(Protocol):
    """A model's weights and operations. ``x`` is ``[T, hidden]``; ``number`` is a layer's index."""

    @property
    def weights(self) -> Sequence[mx.array]:
        """Return the weights that are MLX arrays. (A CPU's packed weights are no MLX arrays.)"""

    @property
    def softmaxes(self) -> Sequence[metal_ext.Softmax]:
        """Return the softmax of each attention layer."""

    def embed(self, token_ids: mx.array) -> mx.array:
        """Return the embeddings ``[T, hidden]`` of int32 token ids ``[T]``."""

    def project(self, number: int, x: mx.array, views: KVViews) -> tuple[mx.array, mx.array | None]:
        """Append the keys and values of x to the layer's cache. Return two arrays ``[T, heads,
        head_dim]``: the queries, and the output gate before its sigmoid (None without a gate)."""

    def recur(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        """Advance the layer's recurrent states by x; return the output ``[T, values_width]``."""

    def add_mixed(self, number: int, x: mx.array, mixed: mx.array) -> mx.array:
        """Return x plus the projection of ``mixed``, the output of attention or of ``recur``."""

    def add_mlp(self, number: int, x: mx.array) -> mx.array:
        """Return x plus the MLP's output for x."""

    def norm(self, x: mx.array) -> mx.array:
        """Return x after the model's final norm."""

    def head(self, states: mx.array) -> mx.array:
        """Return the logits ``[T, vocab]`` of hidden states ``[T, hidden]``."""

    def join(self, token_ids: mx.array, before: mx.array) -> mx.array:
        """Return the input ``[T, hidden]`` of the draft head's layer, whose number is that after
        the last layer. ``before`` has the final hidden state before each token."""

    def draft_norm(self, x: mx.array) -> mx.array:
        """Return x after the draft head's final norm."""


class Forward:
    """A loaded model. Only the thread that loaded the model may use it."""

    def __init__(self, spec: ModelSpec, ops: Ops) -> None:
        self.ops = ops
        self._layers = list(zip(spec.all_layers, spec.places, strict=True))
        self._depth, self._drafts = len(spec.layers), spec.draft is not None
        self._softcap = spec.logit_softcap

    @property
    def weights(self) -> Sequence[mx.array]:
        return self.ops.weights

    def hidden(self, token_ids: mx.array, views: KVViews, rows: mx.array | None) -> mx.array | None:
        """Run the model over int32 ``token_ids`` ``[T]``, and append K and V to the cache. Return
        the hidden states ``[R, hidden]`` of the tokens at indices ``rows`` ``[R]``, after the final
        norm. If ``rows`` is None, return None.

        A draft head's K and V of a token need the hidden state of the token before. A sequence's
        first token has none: the head's layer gets zeros for it.
        """
        ops = self.ops
        x = ops.embed(token_ids)
        for number in range(self._depth):
            mixed = self._mixed(number, x, views)
            if number == self._depth - 1 and not self._drafts:
                if rows is None:
                    return None  # all K and V are in the cache, and no output is needed
                x, mixed = x[rows], mixed[rows]  # after the last mixer, other rows are not needed
            x = ops.add_mlp(number, ops.add_mixed(number, x, mixed))
        states = ops.norm(x)
        if not self._drafts:
            return states
        before, known = views.shift(states)
        ops.project(self._depth, ops.join(token_ids, before) * known, views)
        return None if rows is None else states[rows]

    def draft(self, token_ids: mx.array, before: mx.array, views: KVViews) -> mx.array:
        """Run the draft head over the newest tokens ``[S]`` of sequences, and append their K and V
        to its layer. ``before`` ``[S, hidden]`` has the final hidden state, or the state that this
        method returned, for each token before. Return states ``[S, hidden]`` for ``head``."""
        ops, number = self.ops, self._depth
        x = ops.join(token_ids, before)
        x = ops.add_mixed(number, x, self._mixed(number, x, views))
        return ops.draft_norm(ops.add_mlp(number, x))

    def _mixed(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        layer, place = self._layers[number]
        if not isinstance(layer.mixer, Attention):
            return self.ops.recur(number, x, views)
        queries, gate = self.ops.project(number, x, views)
        attended = views.attend(place, queries, self.ops.softmaxes[place])
        return attended if gate is None else attended * mx.sigmoid(gate)

    def head(self, states: mx.array) -> mx.array:
        """Return the logits ``[R, vocab]`` of hidden states ``[R, hidden]``."""
        logits = self.ops.head(states)
        return self._softcap * mx.tanh(logits / self._softcap) if self._softcap else logits


def softmaxes(
    spec: ModelSpec, tensors: ModelTensors, constants: Mapping[str, mx.array]
) -> list[metal_ext.Softmax]:
    """Return the softmax of each attention layer. ``constants`` has the sinks (float32)."""
    return [
        metal_ext.Softmax(
            each.scale,
            window=each.window,
            softcap=each.softcap,
            sinks=None if at.sinks is None else constants[at.sinks.name],
        )
        for each, at in zip(spec.attentions, tensors.attentions, strict=True)
    ]


def qk_transforms(
    spec: ModelSpec, tensors: ModelTensors, vectors: Mapping[str, mx.array]
) -> list[metal_ext.QKTransform]:
    """Return the norms and RoPE of each attention layer. ``vectors`` has norm weights (float32)."""
    ropes = {
        (its.rope, its.head_dim): metal_ext.RopeTable(
            its.rope.frequencies(its.head_dim), its.rope.magnitude
        )
        for its in spec.attentions
    }
    transforms = []
    for attention, at in zip(spec.attentions, tensors.attentions, strict=True):
        norms = None
        if at.query_norm is not None and at.key_norm is not None:
            norms = (vectors[at.query_norm.name], vectors[at.key_norm.name], spec.norm_eps)
        transforms.append(metal_ext.QKTransform(norms, ropes[attention.rope, attention.head_dim]))
    return transforms


def split_gate(projected: mx.array) -> tuple[mx.array, mx.array]:
    """Split ``[T, 2 * heads, head_dim]`` into queries and gates, which alternate by head."""
    return projected[:, ::2], projected[:, 1::2]


def conv_by_taps(net: GatedDeltaNet, conv: mx.array) -> mx.array:
    """Transpose a convolution's stored weights to ``[taps, conv_width]``."""
    return mx.contiguous(conv.reshape(net.conv_width, net.taps).T)


def gated_delta(
    net: GatedDeltaNet, eps: float, at: DeltaTensors, arrays: Mapping[str, mx.array]
) -> metal_ext.GatedDelta:
    """Return a gated delta net's constants. ``arrays`` has float32 tensors by name, among them the
    result of ``conv_by_taps``."""
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
