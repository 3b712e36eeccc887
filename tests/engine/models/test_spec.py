"""What follows from a spec alone."""

from dataclasses import replace

import pytest

from engine.models.spec import Attention, DenseMlp, LayerSpec, ModelSpec, Rope

ATTENTION = Attention(4, 2, 8, Rope(100.0, scale=0.5), qk_norm=True, qkv_bias=False)
LAYER = LayerSpec(ATTENTION, DenseMlp(32))
SPEC = ModelSpec("Any", 100, 16, (LAYER, LAYER), True, 1e-6, 512)


def test_the_frequencies_of_a_plain_rope_are_powers_of_its_base() -> None:
    assert ATTENTION.rope.frequencies(8) == pytest.approx(
        [0.5, 0.5 / 10**0.5, 0.05, 0.05 / 10**0.5]
    )


def test_scores_are_scaled_by_the_root_of_head_dim() -> None:
    assert replace(ATTENTION, head_dim=16).scale == 0.25


def test_rows_of_k_and_v_must_be_alike_in_all_layers() -> None:
    assert (SPEC.num_layers, SPEC.kv_row) == (2, (2, 8))
    heads = replace(SPEC, layers=(LAYER, replace(LAYER, attention=replace(ATTENTION, heads=8))))
    assert heads.kv_row == (2, 8), "the number of queries does not matter"
    wide = replace(SPEC, layers=(LAYER, replace(LAYER, attention=replace(ATTENTION, kv_heads=4))))
    with pytest.raises(ValueError, match="too many values"):
        assert wide.kv_row
