"""Each operation, on each kind of substrate, against MLX."""

from itertools import product

import mlx.core as mx
import pytest

import metal_ext
from tests.metal.graph import _standin
from tests.metal.graph.stage import KINDS, Shape, Stage

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Every pair of dtypes, with dimensions and kinds dealt out over them.
SHAPES = [
    (kind, Shape(head_dim=(64, 128, 256)[i % 3], kept=kept, computed=computed))
    for i, ((kept, computed), kind) in enumerate(
        zip(product(DTYPES, DTYPES), (*KINDS, *KINDS[1:], KINDS[0], *KINDS[::-1]), strict=True)
    )
]


@pytest.mark.parametrize(("kind", "shape"), SHAPES, ids=str)
def test_a_step_of_ragged_rows_and_a_chunk_is_attention(kind: str, shape: Shape) -> None:
    stage = Stage(kind, shape, heaps=4)
    short, long, chunk = (stage.open(shape.block_tokens * n) for n in (1, 2, 2))
    stage.step((short, 3), (long, shape.block_tokens))
    stage.step((short, 1), (long, 1), (chunk, 9))
    stage.step((long, 1), (chunk, 5))
    stage.end()


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_rows_may_begin_anywhere_in_the_table(kind: str) -> None:
    stage = Stage(kind)
    one, other = stage.open(64), stage.open(64)
    stage.step((one, 7), (other, 40))
    rows = stage.rows((one, 2), (other, 3))
    keys, values = (stage.shape.numbers(5, stage.shape.kv_heads) for _ in "kv")
    queries = stage.shape.numbers(5, stage.shape.query_heads)
    stage.append(rows, 0, keys, values)
    out = mx.concatenate(
        [stage.decode(rows, 0, 0, queries[:1]), stage.decode(rows, 0, 1, queries[1:])]
    )
    mx.eval(metal_ext.step_end([out], rows, stage.substrate), out)
    stage.measure(out, stage.expected(0, [(one, 2), (other, 3)], queries, keys, values))
    stage.end()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "normed", "turned"),
    [
        *((dtype, True, True) for dtype in DTYPES),
        (mx.float32, False, True),
        (mx.float32, True, False),
        (mx.float32, False, False),
    ],
    ids=str,
)
def test_projecting_is_norm_then_rope_then_append(
    kind: str, dtype: mx.Dtype, normed: bool, turned: bool
) -> None:
    stage = Stage(kind, Shape(kept=dtype, computed=dtype))
    shape, base, factor, magnitude, eps = stage.shape, 5e5, 0.5, 1.25, 1e-6
    one, other = stage.open(64), stage.open(64)
    stage.step((one, 30), (other, 5))
    rows, positions = stage.rows((one, 1), (other, 6)), [30, *range(5, 11)]
    queries = shape.numbers(7, shape.query_heads)
    keys, values = (shape.numbers(7, shape.kv_heads) for _ in "kv")
    q_weight, k_weight = (mx.random.uniform(0.5, 1.5, (shape.head_dim,)) for _ in "qk")
    half = shape.head_dim // 2
    rope = metal_ext.RopeTable([factor * base ** (-i / half) for i in range(half)], magnitude)
    stage.tokens[1], projected = metal_ext.project_append(
        stage.tokens[1], queries, keys, values, (q_weight, k_weight, eps) if normed else None,
        rope if turned else None, rows, stage.layers[1], stage.substrate,
    )  # fmt: skip
    kept = [stage.past(rows, 1, n, s, c) for n, (s, c) in enumerate([(one, 1), (other, 6)])]
    copies = [x + 0 for pair in kept for x in pair]
    mx.eval(metal_ext.step_end([projected, *copies], rows, stage.substrate), projected, copies)

    def right(x: mx.array, weight: mx.array) -> mx.array:
        heads = x.astype(mx.float32)
        if normed:
            heads = mx.fast.rms_norm(heads, weight, eps)
        if turned:
            heads = magnitude * mx.concatenate([
                mx.fast.rope(
                    heads[i : i + 1, :, None], shape.head_dim, traditional=False, base=base,
                    scale=factor, offset=position,
                )[:, :, 0]
                for i, position in enumerate(positions)
            ])  # fmt: skip
        return heads.astype(dtype)

    stage.measure(projected, right(queries, q_weight))
    kept_keys = right(keys, k_weight)
    for number, (sequence, rows_) in enumerate([(one, kept_keys[:1]), (other, kept_keys[1:])]):
        stage.measure(copies[2 * number], mx.concatenate([sequence.keys[1], rows_]))
    stage.measure(copies[3], mx.concatenate([other.values[1], values[1:]]))
    stage.end()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_gathered_are_the_rows_themselves(kind: str) -> None:
    stage = Stage(kind)
    one, other = stage.open(140), stage.open(140)
    stage.step((one, 130), (other, 77))
    rows = stage.rows((one, 1), (other, 1))
    shape, token = stage.shape, stage.tokens[1]
    for tokens in (1, 64, 65, 77):
        keys, values = metal_ext.gather(
            token, rows, 1, tokens, stage.layers[1], shape.kv_heads, shape.head_dim, stage.substrate
        )
        assert mx.array_equal(keys, other.keys[1][:tokens])
        assert mx.array_equal(values, other.values[1][:tokens])
        assert keys.dtype == values.dtype == shape.kept
    mx.eval(metal_ext.step_end([token], rows, stage.substrate))
    stage.end()


@pytest.mark.parametrize("kind", ["sparse", "paged"])
def test_a_range_may_need_several_buffers(kind: str) -> None:
    shape = Shape(layers=3)
    layer = 2 * shape.blocks_per_range * 16384
    stage = Stage(kind, shape, max_buffer_bytes=max(layer, stage_heap_bytes(kind, shape)))
    assert stage.substrate.buffers_per_range == (3 if kind == "sparse" else 1)
    one, other = stage.open(70), stage.open(70)
    stage.step((one, 60), (other, 3))
    stage.step((one, 1), (other, 4))
    stage.end()


def stage_heap_bytes(kind: str, shape: Shape) -> int:
    return 0 if kind == "sparse" else shape.geometry(kind).heap_bytes


def test_arrays_may_have_any_strides() -> None:
    stage = Stage("sparse")
    shape, one = stage.shape, stage.open(64)
    rows = stage.rows((one, 5))
    keys, values = (shape.numbers(shape.kv_heads, 5).swapaxes(0, 1) for _ in "kv")
    wide = mx.random.normal((5, shape.query_heads, 2 * shape.head_dim))
    queries = wide[..., ::2]
    stage.append(rows, 0, keys, values)
    out = stage.decode(rows, 0, 0, queries)
    mx.eval(metal_ext.step_end([out], rows, stage.substrate), out)
    stage.measure(out, stage.expected(0, [(one, 5)], queries, keys, values))
    stage.end()


def test_handles_may_go_as_soon_as_the_graph_is_made() -> None:
    for kind in KINDS:
        stage = Stage(kind)
        shape, one = stage.shape, stage.open(64)
        rows = stage.rows((one, 5))
        keys, values = (shape.numbers(5, shape.kv_heads) for _ in "kv")
        queries = shape.numbers(5, shape.query_heads)
        stage.append(rows, 0, keys, values)
        past = stage.past(rows, 0, 0, one, 5)
        out = [stage.decode(rows, 0, 0, queries), stage.chunk(queries, *past)]
        end = metal_ext.step_end([*out, stage.tokens[0]], rows, stage.substrate)
        expected = stage.expected(0, [(one, 5)], queries, keys, values)
        del rows, past, stage, one
        mx.eval(end, out)
        for x in out:
            assert mx.abs(x - expected).max() < 1e-4
        del end, out, x
        _standin.settle()
