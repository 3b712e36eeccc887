"""Packs a checkpoint's layers, one at a time, so that only one layer's weights are there twice."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

import metal_ext
from engine.models.packed_qwen3 import Norm, PackedLayer, PackedQwen3
from engine.models.qwen3 import norm_and_rope
from kvcache.backend import NormAndRope

Packed = Callable[[int], None]
"""Called with the bytes of every layer that has been packed."""


def pack_qwen3(model: Any, workers: metal_ext.CpuWorkers, packed: Packed) -> PackedQwen3:
    """Return the packed forward of an ``mlx_lm.models.qwen3.Model`` that is not evaluated yet.
    Takes the model apart: it is of no use afterwards."""

    def join(modules: Sequence[Any]) -> metal_ext.PackedLinear:
        layer = pack_linear(modules, workers)
        packed(layer.nbytes)
        return layer

    inner = model.model
    embedding = join([_taken(inner, "embed_tokens")])
    head = embedding if model.args.tie_word_embeddings else join([_taken(model, "lm_head")])
    norm = _norm(inner.norm)
    unpacked, inner.layers = inner.layers[::-1], []
    layers = []
    while unpacked:
        layers.append(_pack_layer(unpacked.pop(), join))
    mx.clear_cache()
    return PackedQwen3(embedding, layers, norm, head, workers)


def pack_linear(modules: Sequence[Any], workers: metal_ext.CpuWorkers) -> metal_ext.PackedLinear:
    """Pack linear layers or an embedding, plain or in MLX's groups, one behind the other as one.

    Raises ValueError where they cannot be.
    """
    grouped = [hasattr(module, "scales") for module in modules]
    codes = [(m.scales, m.biases, m.bits, m.group_size) for m in modules] if all(grouped) else []
    if any(grouped) and not codes:
        raise ValueError("some of the layers are packed by their checkpoint, and some are not")
    return metal_ext.PackedLinear([module.weight for module in modules], workers, codes)


def _pack_layer(layer: Any, join: Callable[[Sequence[Any]], metal_ext.PackedLinear]) -> PackedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = norm_and_rope(attention)
    assert norms is not None, "no checkpoint that is served has a RoPE of its own"
    return PackedLayer(
        attention_norm=_norm(layer.input_layernorm),
        queries_keys_values=join([attention.q_proj, attention.k_proj, attention.v_proj]),
        norms=NormAndRope(
            query_weight=_float32(norms.query_weight),
            key_weight=_float32(norms.key_weight),
            eps=norms.eps,
            rope_base=norms.rope_base,
            rope_scale=norms.rope_scale,
        ),
        scale=attention.scale,
        output=join([attention.o_proj]),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=join([mlp.gate_proj, mlp.up_proj]),
        down=join([mlp.down_proj]),
    )


def _taken(module: Any, name: str) -> Any:
    """Return a part of a model, which has it no longer."""
    part = getattr(module, name)
    delattr(module, name)
    return part


def _norm(module: Any) -> Norm:
    return Norm(_float32(module.weight), module.eps)


def _float32(weight: mx.array) -> mx.array:
    wide = weight.astype(mx.float32)
    mx.eval(wide)
    return wide
