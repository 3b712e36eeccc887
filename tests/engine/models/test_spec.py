"""What follows from a spec alone."""

from dataclasses import replace

import pytest

from engine.models.spec import Attention, DenseMlp, LayerSpec, ModelSpec, Rope
from kvcache.layout import KVFormat, KVSpec

ATTENTION = Attention(4, 2, 8, Rope(100.0, scale=0.5), qk_norm=True, qkv_bias=False)
LAYER = LayerSpec(ATTENTION, DenseMlp(32))
SPEC = ModelSpec("Any", 100, 16, (LAYER, LAYER), True, 1e-6, 512)


def test_the_frequencies_of_a_plain_rope_are_powers_of_its_base() -> None:
    assert ATTENTION.rope.frequencies(8) == pytest.approx(
        [0.5, 0.5 / 10**0.5, 0.05, 0.05 / 10**0.5]
    )


def test_scores_are_scaled_by_the_root_of_head_dim() -> None:
    assert replace(ATTENTION, head_dim=16).scale == 0.25


def test_every_layer_keeps_rows_of_its_own_shape() -> None:
    same = KVSpec(2, 8, KVFormat.FLOAT32)
    assert SPEC.kv_shape(KVFormat.FLOAT32).layers == (same, same)
    heads = replace(SPEC, layers=(LAYER, replace(LAYER, mixer=replace(ATTENTION, heads=8))))
    shape = heads.kv_shape(KVFormat.FLOAT32)
    assert shape.specs == (same,), "the number of queries does not matter"
    wide = replace(SPEC, layers=(LAYER, replace(LAYER, mixer=replace(ATTENTION, kv_heads=4))))
    assert wide.kv_shape(KVFormat.FLOAT32).specs == (same, KVSpec(4, 8, KVFormat.FLOAT32))
