"""Each operation, on each kind of backend, against MLX."""

import math
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
@pytest.mark.parametrize("seed", range(5))
def test_each_command_buffer_with_a_command_of_a_step_is_counted_once(kind: str, seed: int) -> None:
    _standin.seed(seed)
    stage = Stage(kind)
    one = stage.open(64)
    for _ in range(5):
        _standin.hand_over()
        counted, made = stage.kv_backend.command_buffers, _standin.counts()["command_buffers"]
        stage.step((one, 1))
        counted = stage.kv_backend.command_buffers - counted
        assert 1 <= counted <= 1 + _standin.counts()["command_buffers"] - made
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
    mx.eval(metal_ext.step_end([out], rows, stage.kv_backend), out)
    stage.measure(out, stage.expected(0, [(one, 2), (other, 3)], queries, keys, values))
    stage.end()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "normed", "turning"),
    [
        *((dtype, True, 64) for dtype in DTYPES),
        (mx.float32, False, 64),
        (mx.float32, True, 16),
        (mx.float32, True, 0),
        (mx.float32, False, 0),
    ],
    ids=str,
)
def test_projecting_is_norm_then_rope_then_append(
    kind: str, dtype: mx.Dtype, normed: bool, turning: int
) -> None:
    stage = Stage(kind, Shape(kept=dtype, computed=dtype))
    shape, base, factor, magnitude, eps = stage.shape, 5e5, 0.5, 1.25, 1e-6
    one, other = stage.open(64), stage.open(64)
    stage.step((one, 30), (other, 5))
    rows, positions = stage.rows((one, 1), (other, 6)), [30, *range(5, 11)]
    queries = shape.numbers(7, shape.query_heads)
    keys, values = (shape.numbers(7, shape.kv_heads) for _ in "kv")
    q_weight, k_weight = (mx.random.uniform(0.5, 1.5, (shape.head_dim,)) for _ in "qk")
    half = turning // 2
    frequencies = [factor * base ** (-i / half) for i in range(half)]
    rope = metal_ext.RopeTable(frequencies, magnitude) if turning else None
    stage.tokens[1], projected = metal_ext.project_append(
        stage.tokens[1], queries, keys, values, (q_weight, k_weight, eps) if normed else None,
        rope, rows, stage.layers[1], stage.kv_backend,
    )  # fmt: skip
    kept = [stage.past(rows, 1, n, s, c) for n, (s, c) in enumerate([(one, 1), (other, 6)])]
    copies = [x + 0 for pair in kept for x in pair]
    mx.eval(metal_ext.step_end([projected, *copies], rows, stage.kv_backend), projected, copies)

    def right(x: mx.array, weight: mx.array) -> mx.array:
        heads = x.astype(mx.float32)
        if normed:
            heads = mx.fast.rms_norm(heads, weight, eps)
        if turning:
            rest = heads[..., turning:]
            heads = magnitude * mx.concatenate([
                mx.fast.rope(
                    heads[i : i + 1, :, None, :turning], turning, traditional=False, base=base,
                    scale=factor, offset=position,
                )[:, :, 0]
                for i, position in enumerate(positions)
            ])  # fmt: skip
            heads = mx.concatenate([heads, rest], axis=-1)
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
    size, token = (stage.shape.kv_heads, stage.shape.head_dim), stage.tokens[1]
    for first, end in ((0, 1), (0, 64), (0, 65), (0, 77), (60, 77)):
        keys, values = metal_ext.gather(
            token, rows, 1, first, end - first, stage.layers[1], *size, stage.kv_backend
        )
        assert mx.array_equal(keys, other.keys[1][first:end])
        assert mx.array_equal(values, other.values[1][first:end])
        assert keys.dtype == values.dtype == stage.shape.kept
    mx.eval(metal_ext.step_end([token], rows, stage.kv_backend))
    stage.end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(kind: str) -> None:
    shape = Shape(kv_heads=1, query_heads=4, layers=1, kept=mx.float32)
    stage = Stage(kind, shape, heaps=3)
    few, most, long = (stage.open(512) for _ in range(3))
    for sequence, tokens in ((few, 100), (most, 255), (long, 256)):
        stage.step((sequence, tokens))
    rows = stage.rows((few, 1), (most, 1), (long, 1))
    queries = stage.shape.numbers(3, 4)
    stage.append(rows, 0, *(stage.shape.numbers(3, 1) for _ in "kv"))
    alone = [stage.decode(rows, 0, n, queries[n : n + 1]) for n in range(3)]
    pair, together = stage.decode(rows, 0, 0, queries[:2]), stage.decode(rows, 0, 0, queries)
    mx.eval(metal_ext.step_end([*alone, pair, together], rows, stage.kv_backend))
    assert mx.array_equal(mx.concatenate(alone), together)
    assert mx.array_equal(pair, together[:2])
    stage.end()


def test_a_window_is_cut_into_splits_of_its_own_and_sinks_join_them() -> None:
    shape = Shape(kv_heads=1, query_heads=2, layers=1, kept=mx.float32)
    stage = Stage("sparse", shape)
    one = stage.open(512)
    stage.step((one, 400))
    rows, token = stage.rows((one, 1)), stage.shape.numbers(1, 1)
    stage.append(rows, 0, token, token)
    queries = stage.shape.numbers(1, 2)
    sinks = mx.array([-1.0, 2.0])
    keys = mx.concatenate([one.keys[0], token]).astype(mx.float32)
    values = mx.concatenate([one.values[0], token]).astype(mx.float32)
    for window, commands in ((100, 1), (256, 1), (300, 2)):
        out = stage.decode(rows, 0, 0, queries, window=window, softcap=3.0, sinks=sinks)
        mx.eval(out)
        calls = _standin.calls("decode_attention")
        assert calls.count("dispatch_threadgroups") == commands
        scores = queries[0] @ keys[-window:, 0].T * shape.head_dim**-0.5
        scores = mx.concatenate([3.0 * mx.tanh(scores / 3.0), sinks[:, None]], axis=1)
        wanted = mx.softmax(scores, axis=1)[:, :-1] @ values[-window:, 0]
        stage.measure(out[0], wanted)
    mx.eval(metal_ext.step_end([out], rows, stage.kv_backend))
    stage.end()


@pytest.mark.parametrize(("past", "commands"), [(255, 1), (256, 2)])
def test_what_is_one_split_is_one_command(past: int, commands: int) -> None:
    stage = Stage("sparse", Shape(kv_heads=1, query_heads=4, layers=1, kept=mx.float32))
    one, other = stage.open(512), stage.open(512)
    stage.step((one, past), (other, 3))
    stage.step((one, 1), (other, 1))
    calls = _standin.calls("decode_attention")
    assert calls.count("dispatch_threadgroups") == commands
    assert calls.count("add_temporary") == 2 * (commands - 1)
    stage.end()


@pytest.mark.parametrize(("kind", "named"), [("sparse", 0), ("paged", 0), ("dense", 1)])
def test_rows_that_are_decoded_name_no_buffer_but_the_arena(kind: str, named: int) -> None:
    stage = Stage(kind, heaps=4)
    every = [stage.open(64) for _ in range(4)]
    stage.step(*((sequence, 2) for sequence in every))
    in_chunks = {"sparse": 4, "paged": 0, "dense": 1}[kind]
    assert _standin.calls("append").count("set_output_array") == 1 + in_chunks
    stage.step(*((sequence, 1) for sequence in every))
    assert _standin.calls("append").count("set_output_array") == 1 + named
    stage.end()


def test_arrays_may_have_any_strides() -> None:
    stage = Stage("sparse")
    shape, one = stage.shape, stage.open(64)
    rows = stage.rows((one, 5))
    keys, values = (shape.numbers(shape.kv_heads, 5).swapaxes(0, 1) for _ in "kv")
    wide = mx.random.normal((5, shape.query_heads, 2 * shape.head_dim))
    queries = wide[..., ::2]
    stage.append(rows, 0, keys, values)
    out = stage.decode(rows, 0, 0, queries)
    weight = mx.random.uniform(0.5, 1.5, (2 * shape.head_dim,))[::2]
    stage.tokens[1], projected = metal_ext.project_append(
        stage.tokens[1], queries, keys, values, (weight, weight, 1e-6), None, rows,
        stage.layers[1], stage.kv_backend,
    )  # fmt: skip
    mx.eval(metal_ext.step_end([out, projected], rows, stage.kv_backend), out, projected)
    for operation, copies in (("append", 2), ("decode_attention", 1), ("project_append", 5)):
        assert _standin.calls(operation).count("ordered_copy") == copies
    stage.measure(out, stage.expected(0, [(one, 5)], queries, keys, values))
    stage.measure(projected, mx.fast.rms_norm(queries, weight, 1e-6))
    stage.end()


def test_arrays_that_begin_between_vectors_are_copied() -> None:
    stage = Stage("sparse")
    shape, one = stage.shape, stage.open(64)
    rows = stage.rows((one, 5))

    def begins_at(first: int, heads: int) -> mx.array:
        size = (5, heads, shape.head_dim)
        return mx.random.normal((4 + math.prod(size),))[first:][: math.prod(size)].reshape(size)

    keys, values = begins_at(1, shape.kv_heads), begins_at(4, shape.kv_heads)
    queries = begins_at(2, shape.query_heads)
    stage.append(rows, 0, keys, values)
    out = stage.decode(rows, 0, 0, queries)
    mx.eval(metal_ext.step_end([out], rows, stage.kv_backend), out)
    for operation in ("append", "decode_attention"):
        assert _standin.calls(operation).count("ordered_copy") == 1
    stage.measure(out, stage.expected(0, [(one, 5)], queries, keys, values))
    stage.end()


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim"),
    [(10, 2, 64), (12, 2, 256), (14, 2, 128), (16, 2, 256), (9, 1, 64), (16, 1, 128)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_any_size_are_attention(
    kind: str, query_heads: int, kv_heads: int, head_dim: int
) -> None:
    shape = Shape(kv_heads, query_heads, head_dim, blocks_per_range=24)
    stage = Stage(kind, shape, heaps=8)
    one, other = stage.open(300), stage.open(64)
    stage.step((one, 259), (other, 3))
    stage.step((one, 1), (other, 1))
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
        end = metal_ext.step_end([*out, stage.tokens[0]], rows, stage.kv_backend)
        expected = stage.expected(0, [(one, 5)], queries, keys, values)
        del rows, past, stage, one
        mx.eval(end, out)
        for x in out:
            assert mx.abs(x - expected).max() < 1e-4
        del end, out, x
        _standin.settle()
