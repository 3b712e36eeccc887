"""Qwen3 dense over a flat token array.

All sequences of a step share one ``x[T, hidden]``, so that every linear layer sees one matrix; only
RoPE (a position per token) and attention (a sequence per token) tell them apart. Weights and
quantised layers are mlx-lm's modules, walked here in our order; mlx-lm's forward is the reference.
"""

from typing import Any, Protocol

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from kvcache.backend import NormAndRope


class LayerViews(Protocol):
    """What the forward needs of the cache; ``kvcache.views.KVViews`` is one."""

    @property
    def fuses_projection(self) -> bool:
        """Return whether ``project`` is there."""

    def project(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, norms: NormAndRope
    ) -> mx.array:
        """Apply norm and RoPE to the step's queries and keys, and ``append``; return the
        queries."""

    def append(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Write the step's keys and values of a layer."""

    def attend(self, layer: int, queries: mx.array, scale: float) -> mx.array:
        """Return the attention of the step's queries of a layer."""


class Qwen3:
    """The forward of an ``mlx_lm.models.qwen3.Model``."""

    def __init__(self, model: Any) -> None:
        """model: loaded and evaluated on the thread that will call this."""
        args = model.args
        self._model = model.model
        self._project_out = (
            model.model.embed_tokens.as_linear if args.tie_word_embeddings else model.lm_head
        )
        self._query_heads: int = args.num_attention_heads
        self._kv_heads: int = args.num_key_value_heads
        self._head_dim: int = args.head_dim
        self.weights: list[mx.array] = [array for _, array in tree_flatten(model.parameters())]
        self._norms = [norm_and_rope(layer.self_attn) for layer in model.model.layers]

    def hidden(
        self, token_ids: mx.array, positions: mx.array, views: LayerViews, rows: mx.array | None
    ) -> mx.array | None:
        """Return the states ``[R, hidden]`` of the given rows after the final norm.

        token_ids, positions: ``[T]`` int32. rows: ``[R]`` int32 indices into T. With rows None only
        the cache is filled, and None is returned.
        """
        x = self._model.embed_tokens(token_ids)
        layers = self._model.layers
        for number, layer in enumerate(layers):
            normed = layer.input_layernorm(x)
            queries = self._project(layer.self_attn, number, normed, positions, views)
            if number + 1 == len(layers) and rows is None:
                return None
            attended = views.attend(number, queries, layer.self_attn.scale)
            if number + 1 == len(layers):
                x, attended = x[rows], attended[rows]  # no later layer needs the others
            x = x + layer.self_attn.o_proj(attended.reshape(x.shape[0], -1))
            x = x + _mlp(layer.mlp, layer.post_attention_layernorm(x))
        states: mx.array = self._model.norm(x)
        return states

    def head(self, states: mx.array) -> mx.array:
        """Return the logits ``[R, vocab]``."""
        logits: mx.array = self._project_out(states)
        return logits

    def _project(
        self, attention: Any, number: int, x: mx.array, positions: mx.array, views: LayerViews
    ) -> mx.array:
        """Append this layer's keys and values; return its queries ``[T, heads, head_dim]``."""
        tokens = x.shape[0]
        queries: mx.array = attention.q_proj(x)
        queries = queries.reshape(tokens, self._query_heads, self._head_dim)
        keys = attention.k_proj(x).reshape(tokens, self._kv_heads, self._head_dim)
        values = attention.v_proj(x).reshape(tokens, self._kv_heads, self._head_dim)
        norms = self._norms[number] if views.fuses_projection else None
        dtype = queries.dtype
        if norms is not None and norms.query_weight.dtype == norms.key_weight.dtype == dtype:
            return views.project(number, queries, keys, values, norms)
        # A token is a batch entry here, because RoPE takes one offset per entry.
        queries = attention.rope(attention.q_norm(queries[:, :, None]), offset=positions)
        keys = attention.rope(attention.k_norm(keys[:, :, None]), offset=positions)
        views.append(number, keys.squeeze(2), values)
        return queries.squeeze(2)


def norm_and_rope(attention: Any) -> NormAndRope | None:
    """Return a layer's norms and RoPE as one kernel wants them; None where the RoPE is one of its
    own."""
    rope = attention.rope
    plain = type(rope) is nn.RoPE and not rope.traditional
    if not plain or rope.dims != attention.q_norm.weight.size:
        return None
    return NormAndRope(
        query_weight=attention.q_norm.weight,
        key_weight=attention.k_norm.weight,
        eps=attention.q_norm.eps,
        rope_base=rope.base,
        rope_scale=rope.scale,
    )


def _mlp(mlp: Any, x: mx.array) -> mx.array:
    # nn.silu is compiled, and on Linux MLX compiles with g++ while it runs.
    gate = mlp.gate_proj(x)
    out: mx.array = mlp.down_proj(gate * mx.sigmoid(gate) * mlp.up_proj(x))
    return out
