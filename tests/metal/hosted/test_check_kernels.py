"""The references that the kernels are held against, held against MLX's own operations."""

import mlx.core as mx
import numpy as np

from tests.metal.hosted.check_kernels import (
    EPS,
    KV_HEADS,
    QUERY_HEADS,
    ROPE_BASE,
    ROPE_SCALE,
    attention,
    share_of_allowed,
    turned,
)

HEAD_DIM, TOKENS = 64, 300


def test_the_reference_of_attention_is_mlx_s() -> None:
    random = np.random.default_rng(1)
    queries = random.standard_normal((QUERY_HEADS, HEAD_DIM))
    keys, values = (random.standard_normal((TOKENS, KV_HEADS, HEAD_DIM)) for _ in range(2))
    of_mlx = mx.fast.scaled_dot_product_attention(
        mx.array(queries.astype(np.float32))[None, :, None],
        mx.array(keys.astype(np.float32)).transpose(1, 0, 2)[None],
        mx.array(values.astype(np.float32)).transpose(1, 0, 2)[None],
        scale=0.3,
    )
    found = np.array(of_mlx)[0, :, 0].astype(np.float64)
    assert share_of_allowed(found, attention(queries, keys, values, 0.3), 1e-5) < 1


def test_the_reference_of_norm_and_rope_is_mlx_s() -> None:
    random = np.random.default_rng(2)
    rows = random.standard_normal((KV_HEADS, HEAD_DIM))
    weight = random.standard_normal(HEAD_DIM)
    normed = mx.fast.rms_norm(
        mx.array(rows.astype(np.float32)), mx.array(weight.astype(np.float32)), EPS
    )
    of_mlx = mx.fast.rope(
        normed[None, :, None], HEAD_DIM, traditional=False, base=ROPE_BASE, scale=ROPE_SCALE,
        offset=700,
    )  # fmt: skip
    found = np.array(of_mlx)[0, :, 0].astype(np.float64)
    assert share_of_allowed(found, turned(rows, weight, 700), 1e-4) < 1


def test_an_error_is_a_share_of_what_is_allowed_and_no_number_is_none() -> None:
    zeros, half = np.zeros(3), np.array([0.0, 0.5, 0.0])
    assert share_of_allowed(half, zeros, 1.0) == 0.5
    assert share_of_allowed(zeros, zeros, 0.0) == 0.0
    assert share_of_allowed(half, zeros, 0.0) == np.inf
    assert share_of_allowed(np.array([np.nan, 0.0, 0.0]), zeros, 1.0) > 1
