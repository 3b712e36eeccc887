"""Qwen3 dense over packed weights: a CPU's forward, five operations a layer.

The same function as ``engine.models.qwen3``'s, whose docstring says how a step's rows are laid out.
Activations and sums are float32, whatever the weights are stored as.
"""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

import metal_ext
from kvcache.backend import NormAndRope


class JoinedLayerViews(Protocol):
    """What the forward needs of the cache; ``kvcache.views.KVViews`` is one on a CPU."""

    def project_joined(self, layer: int, joined: mx.array, norms: NormAndRope) -> mx.array:
        """Apply norm and RoPE to the step's queries and keys, and append the keys and values;
        return the queries."""

    def attend(self, layer: int, queries: mx.array, scale: float) -> mx.array:
        """Return the attention of the step's queries of a layer."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm."""

    weight: mx.array
    """``[hidden]`` float32."""
    eps: float


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer, its products joined where they read the same rows."""

    attention_norm: Norm
    queries_keys_values: metal_ext.PackedLinear
    norms: NormAndRope
    """Its weights are float32."""
    scale: float
    """Of queries times keys."""
    output: metal_ext.PackedLinear
    mlp_norm: Norm
    gate_up: metal_ext.PackedLinear
    down: metal_ext.PackedLinear


class PackedQwen3:
    """The forward over packed layers."""

    def __init__(
        self,
        embedding: metal_ext.PackedLinear,
        layers: list[PackedLayer],
        norm: Norm,
        head: metal_ext.PackedLinear,
        workers: metal_ext.CpuWorkers,
    ) -> None:
        """embedding: a row for each token. norm: the last one, before the head."""
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._workers = workers

    def hidden(
        self,
        token_ids: mx.array,
        positions: mx.array,
        views: JoinedLayerViews,
        rows: mx.array | None,
    ) -> mx.array | None:
        """Return the states ``[R, hidden]`` of the given rows after the final norm.

        token_ids: ``[T]`` int32. positions: the views know them. rows: ``[R]`` int32 indices into
        T. With rows None only the cache is filled, and None is returned.
        """
        workers = self._workers
        x = metal_ext.packed_rows(token_ids, self._embedding, workers)
        for number, layer in enumerate(self._layers):
            norm = layer.attention_norm
            joined = metal_ext.linear(
                x, layer.queries_keys_values, workers, norm=norm.weight, eps=norm.eps
            )
            queries = views.project_joined(number, joined, layer.norms)
            if number + 1 == len(self._layers) and rows is None:
                return None
            attended = views.attend(number, queries, layer.scale)
            if number + 1 == len(self._layers):
                x, attended = x[rows], attended[rows]  # no later layer needs the others
            x = metal_ext.linear(attended, layer.output, workers, residual=x)
            norm = layer.mlp_norm
            x = metal_ext.gated_mlp(x, norm.weight, norm.eps, layer.gate_up, layer.down, workers)
        return metal_ext.rms_norm(x, self._norm.weight, self._norm.eps, workers)

    def head(self, states: mx.array) -> mx.array:
        """Return the logits ``[R, vocab]``."""
        return metal_ext.linear(states, self._head, self._workers)
