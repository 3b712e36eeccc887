"""Attention alone, at Qwen3-0.6B's head shape: how much of the memory's speed it reaches.

What is compared runs in turns, so that a disturbance of the machine meets all sides.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

import metal_ext
from tests.bench.limits import ReadProbe
from tests.bench.peers import BrokenError
from tests.bench.rounds import Part, Rounds
from tests.bench.table import Row
from tests.metal_ext.layers import DTYPES, PagedLayer, normal

QUERY_HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
SCALE = HEAD_DIM**-0.5
DECODE_TOKENS = (100, 300, 500, 800, 1500, 3000, 5500, 8000)
CHUNK_TOKENS, CHUNK_END = 512, 4096
PAGE_BYTES = 65536
# More than most last-level caches hold; what K and V of the decode batch take is 81 MB.
PROBE_BYTES = 256 * 1024**2
READ_PASSES = 3
# As many sweeps as the probe makes in its passes, some ways each: caches warm up over sweeps, and
# both sides get the same time for it.
DECODES_PER_ROUND = 4 * READ_PASSES
# Of bfloat16 sums in another order: an error in what is computed is far larger.
TOLERANCE = 0.05
DECODE_TARGET, PADDED_TARGET = 0.6, 10.0


def run_attention(decode: Rounds, chunk: Rounds, threads: int) -> Part:
    """Of one token per sequence, and of a prompt's chunk.

    Raises BrokenError when two sides that should agree do not.
    """
    workers = metal_ext.CpuWorkers(threads)
    with ReadProbe(PROBE_BYTES, threads) as probe:
        rows = _decode_rows(decode, workers, probe)
    for name, dtype in DTYPES.items():
        rows.append(_chunk_row(name, dtype, chunk, workers))
    return Part(rows)


# --- decode ------------------------------------------------------------------------------------


def _decode_rows(rounds: Rounds, workers: metal_ext.CpuWorkers, probe: ReadProbe) -> list[Row]:
    cache = paged_layer(DECODE_TOKENS, mx.bfloat16, workers)
    queries = normal((len(DECODE_TOKENS), QUERY_HEADS, HEAD_DIM), mx.bfloat16)
    mx.eval(queries)
    padded = PaddedBatch(cache)
    naive = np.arange(PROBE_BYTES // 8, dtype=np.uint64)
    rows = cache.newest()

    def decode() -> mx.array:
        return metal_ext.decode_attention(
            cache.token, queries, rows, 0, cache.layer, KV_HEADS, SCALE, workers
        )

    _check_same("decode attention", decode(), padded.attend(queries))
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in rounds:
        read = max(probe.bytes_per_s() for _ in range(READ_PASSES))
        seen["read"].append(read / 1e9)
        seen["naive"].append(PROBE_BYTES / min(_seconds(naive.sum, READ_PASSES)) / 1e9)
        seen["decode"].append(min(_eval_seconds(decode, DECODES_PER_ROUND)))
        seen["padded"].append(_eval_seconds(lambda: padded.attend(queries), 1)[0])
    useful = [cache.useful_bytes / seconds / 1e9 for seconds in seen["decode"]]
    # A probe that loses to a plain sum is no measure of the machine: the faster one is.
    fastest = [max(pair) for pair in zip(seen["read"], seen["naive"], strict=True)]
    batch = f"decode attention, {len(DECODE_TOKENS)} sequences of 100 to 8000 tokens"
    return [
        Row.higher_is_better(
            "read probe", "GB/s", seen["read"], ("numpy sum, as many bytes", seen["naive"]), 1.0
        ),
        Row.higher_is_better(
            batch, "GB/s of useful K and V", useful, ("reading alone", fastest), DECODE_TARGET
        ),
        Row.lower_is_better(
            batch,
            "ms",
            [1e3 * s for s in seen["decode"]],
            ("MLX, padded batch", [1e3 * s for s in seen["padded"]]),
            PADDED_TARGET,
        ),
    ]


def paged_layer(
    lengths: Sequence[int], dtype: mx.Dtype, workers: metal_ext.CpuWorkers
) -> PagedLayer:
    """One layer of sequences whose blocks lie mixed in their heap, as after long serving."""
    return PagedLayer(
        lengths,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        workers=workers,
        page_bytes=PAGE_BYTES,
    ).fill()


class PaddedBatch:
    """The same K and V as one array per kind, every sequence as long as the longest: what a server
    without a page map batches."""

    def __init__(self, cache: PagedLayer) -> None:
        longest = max(cache.lengths)
        self._keys, self._values = (
            _pad(rows, cache.lengths, longest) for rows in (cache.keys, cache.values)
        )
        lengths = mx.array(cache.lengths)[:, None, None, None]
        self._mask = mx.arange(longest)[None, None, None] < lengths
        mx.eval(self._keys, self._values, self._mask)

    def attend(self, queries: mx.array) -> mx.array:
        """queries: ``[sequences, heads, head_dim]``; the same comes back."""
        attended = mx.fast.scaled_dot_product_attention(
            queries[:, :, None], self._keys, self._values, scale=SCALE, mask=self._mask
        )
        return attended[:, :, 0]


def _pad(rows: mx.array, lengths: Sequence[int], longest: int) -> mx.array:
    """``[tokens, heads, head_dim]`` -> ``[sequences, heads, longest, head_dim]``, contiguous."""
    parts: list[mx.array] = []
    start = 0
    for length in lengths:
        part = rows[start : start + length].transpose(1, 0, 2)
        parts.append(mx.pad(part, [(0, 0), (0, longest - length), (0, 0)]))
        start += length
    return mx.stack(parts)


# --- chunks ------------------------------------------------------------------------------------


def _chunk_row(name: str, dtype: mx.Dtype, rounds: Rounds, workers: metal_ext.CpuWorkers) -> Row:
    cache = paged_layer((CHUNK_END,), dtype, workers)
    queries = normal((CHUNK_TOKENS, QUERY_HEADS, HEAD_DIM), dtype)
    rows = cache.rows((0, CHUNK_END - CHUNK_TOKENS, CHUNK_TOKENS))
    keys, values, heads_first = (
        mx.contiguous(rows_.transpose(1, 0, 2)[None])
        for rows_ in (cache.keys, cache.values, queries)
    )
    mx.eval(queries, keys, values, heads_first)

    def ours() -> mx.array:
        return metal_ext.chunk_attention(
            cache.token, queries, rows, 0, cache.layer, KV_HEADS, SCALE, workers
        )

    def stock() -> mx.array:
        attended = mx.fast.scaled_dot_product_attention(
            heads_first, keys, values, scale=SCALE, mask="causal"
        )
        return attended[0].transpose(1, 0, 2)

    _check_same(f"chunk attention in {name}", ours(), stock())
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in rounds:
        seen["ours"].append(_chunk_flop() / _eval_seconds(ours, 1)[0] / 1e9)
        seen["stock"].append(_chunk_flop() / _eval_seconds(stock, 1)[0] / 1e9)
    return Row.higher_is_better(
        f"chunk attention, {CHUNK_TOKENS} tokens up to {CHUNK_END}, {name}",
        "GFLOP/s",
        seen["ours"],
        ("MLX", seen["stock"]),
    )


def _chunk_flop() -> int:
    """Of the pairs that causal attention needs: those above the diagonal do not count."""
    pairs = sum(range(CHUNK_END - CHUNK_TOKENS + 1, CHUNK_END + 1))
    return 4 * pairs * QUERY_HEADS * HEAD_DIM


# --- what both share ---------------------------------------------------------------------------


def _eval_seconds(build: Callable[[], mx.array], times: int) -> list[float]:
    return _seconds(lambda: mx.eval(build()), times)


def _seconds(work: Callable[[], object], times: int) -> list[float]:
    result: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        result.append(time.perf_counter() - started)
    return result


def _check_same(what: str, ours: mx.array, stock: mx.array) -> None:
    """Figures of two computations are worth comparing only where their results agree."""
    worst = mx.abs(ours.astype(mx.float32) - stock.astype(mx.float32)).max()
    if not bool(worst <= TOLERANCE):  # neither when it is no number
        raise BrokenError(f"{what} differs from MLX's by {worst.item()}")
