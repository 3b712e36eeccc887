"""The forward of any model over a flat token array.

All sequences of a step share one ``x[T, hidden]``, so that every linear layer sees one matrix; only
RoPE (a position per token) and attention (a sequence per token) tell them apart. What is computed,
the spec says; how, the operations: ``mlx_ops`` or ``cpu_ops``.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx

import metal_ext
from engine.models.spec import ModelSpec
from engine.models.tensors import ModelTensors
from kvcache.views import KVViews


class Ops(Protocol):
    """A model's weights, and what is computed with them. ``x`` is ``[T, hidden]``; layers go by
    number."""

    @property
    def weights(self) -> Sequence[mx.array]:
        """Return the arrays of MLX that every step reads."""

    def embed(self, token_ids: mx.array) -> mx.array:
        """Return the rows of the embedding. token_ids: ``[T]`` int32."""

    def project(self, number: int, x: mx.array, views: KVViews) -> mx.array:
        """Append a layer's keys and values of x; return its queries ``[T, heads, head_dim]``."""

    def add_attention(self, number: int, x: mx.array, attended: mx.array) -> mx.array:
        """Return x plus a layer's output projection of ``[T, heads, head_dim]``."""

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
        self._layers = spec.layers

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
        for number, layer in enumerate(self._layers):
            queries = ops.project(number, x, views)
            if number == last and rows is None:
                return None
            attended = views.attend(number, queries, layer.attention.scale)
            if number == last:
                x, attended = x[rows], attended[rows]  # no later layer needs the others
            x = ops.add_mlp(number, ops.add_attention(number, x, attended))
        return ops.norm(x)

    def head(self, states: mx.array) -> mx.array:
        """Return the logits ``[R, vocab]``."""
        return self.ops.head(states)


def qk_transforms(
    spec: ModelSpec, tensors: ModelTensors, vectors: Mapping[str, mx.array]
) -> list[metal_ext.QKTransform]:
    """Return what the queries and keys of every layer take before attention. vectors: weights of
    norms by name, of these in float32."""
    ropes = {
        (its.rope, its.head_dim): metal_ext.RopeTable(
            its.rope.frequencies(its.head_dim), its.rope.magnitude
        )
        for its in {layer.attention for layer in spec.layers}
    }
    transforms = []
    for layer, at in zip(spec.layers, tensors.layers, strict=True):
        its, norms = layer.attention, None
        if at.query_norm is not None and at.key_norm is not None:
            norms = (vectors[at.query_norm.name], vectors[at.key_norm.name], spec.norm_eps)
        transforms.append(metal_ext.QKTransform(norms, ropes[its.rope, its.head_dim]))
    return transforms
