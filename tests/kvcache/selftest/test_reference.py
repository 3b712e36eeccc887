import mlx.core as mx
import numpy as np
import pytest

from kvcache.selftest.reference import (
    DeltaConstants,
    DeltaInputs,
    attention,
    gated_delta,
    rms_norm,
    rope,
    sample_rows,
)
from tests.metal_ext.deltas import NORM_EPS, DeltaLayer, DeltaShape

RANDOM = np.random.default_rng(4)


def test_attention_is_what_mlx_calls_attention() -> None:
    queries, keys, values = (RANDOM.normal(size=(n, h, 8)) for n, h in ((3, 4), (9, 2), (9, 2)))
    places = np.array([6, 7, 8])
    arrays = [
        mx.array(a.astype(np.float32)).transpose(1, 0, 2)[None] for a in (queries, keys, values)
    ]
    want = mx.fast.scaled_dot_product_attention(*arrays, scale=0.3, mask="causal")
    got = attention(queries, keys, values, places, 0.3)
    np.testing.assert_allclose(got, np.array(want[0].transpose(1, 0, 2)), atol=1e-6)
    alone = attention(queries[[0]], keys, values, places[[0]], 0.3)
    np.testing.assert_allclose(alone[0], got[0], rtol=1e-12)


def test_norm_and_rope_are_what_mlx_calls_them() -> None:
    rows, weight = RANDOM.normal(size=(3, 2, 16)), RANDOM.normal(size=16)
    array, factors = mx.array(rows.astype(np.float32)), mx.array(weight.astype(np.float32))
    want = mx.fast.rms_norm(array, factors, 1e-5)
    np.testing.assert_allclose(rms_norm(rows, weight, 1e-5), np.array(want), atol=1e-6)
    turned = mx.fast.rope(
        array[:, :, None], 16, traditional=False, base=1e4, scale=0.5, offset=mx.array([0, 5, 700])
    )
    got = rope(rows, np.array([0, 5, 700]), 1e4, 0.5)
    np.testing.assert_allclose(got, np.array(turned.squeeze(2)), atol=1e-4)


def test_a_recurrence_is_that_which_the_cpus_kernels_are_held_to() -> None:
    layer = DeltaLayer(DeltaShape(key_heads=1, value_heads=3, key_dim=16, value_dim=16))
    inputs = layer.inputs(7)
    names = ("conv", "a_log", "dt_bias", "norm")
    constants = DeltaConstants(*(np.array(layer.arguments[name]) for name in names))
    want, _ = layer.expected(inputs, layer.zeros())
    got = gated_delta(DeltaInputs(*inputs.arrays), constants, NORM_EPS)
    np.testing.assert_allclose(got, want, atol=1e-9)


@pytest.mark.parametrize("count", [1, 2, 40, 1000])
def test_the_first_and_the_last_row_are_looked_at(count: int) -> None:
    rows = sample_rows(count)
    assert (rows[0], rows[-1]) == (0, count - 1)
    assert len(rows) == len(set(rows.tolist())) == min(count, 40)
