"""What a model layer sees of the cache during one step: append rows, attend to them."""

from collections.abc import Sequence

import mlx.core as mx

import metal_ext
from kvcache.backend import LayerRegions, PageBackend, Segment
from kvcache.layout import KVLayout, KVShape
from metal_ext import QKTransform


class CacheTokens:
    """The newest cache token of every layer: the arrays that order reads after writes.

    They live as long as the engine, so that the order also holds from step to step.
    """

    def __init__(self, num_layers: int) -> None:
        self.newest: list[mx.array] = [mx.zeros((1,)) for _ in range(num_layers)]


class KVViews:
    """The rows of one step, for all layers.

    Row i of the flat token array is row i here. Segments of one row come first: they are decoded
    in one call; each longer segment is a chunk of its own.
    """

    def __init__(
        self,
        layers: Sequence[LayerRegions],
        tokens: CacheTokens,
        backend: PageBackend,
        segments: Sequence[Segment],
        epoch: int,
    ) -> None:
        """epoch: the number that this step's completion will have."""
        counts = [segment.count for segment in segments]
        self.epoch = epoch
        self.segments = tuple(segments)
        self._layers = layers
        self._tokens = tokens
        self._rows = backend.rows(self.segments)
        self._decode_rows = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        self._chunks = list(counts[self._decode_rows :])

    # --- the layers -----------------------------------------------------------------------------

    def append(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        transform: QKTransform | None,
    ) -> mx.array:
        """Transform this step's queries and keys, where there is a transform, and write its keys
        and values; return the queries.

        queries: ``[T, query_heads, head_dim]``; keys, values: ``[T, kv_heads, head_dim]``; all of
        one dtype.
        """
        self._tokens.newest[layer], queries = self._rows.append(
            self._tokens.newest[layer], self._layers[layer], queries, keys, values, transform
        )
        return queries

    def attend(self, layer: int, queries: mx.array, scale: float) -> mx.array:
        """Return the attention of ``[T, query_heads, head_dim]``, each row over its sequence up to
        itself."""
        token, regions = self._tokens.newest[layer], self._layers[layer]
        split = self._decode_rows
        parts: list[mx.array] = []
        if split:
            decoding = queries[:split] if self._chunks else queries
            parts.append(self._rows.decode_attention(token, regions, decoding, scale))
        start = split
        for number, count in enumerate(self._chunks, split):
            chunk = queries[start : start + count] if len(queries) != count else queries
            parts.append(self._rows.chunk_attention(token, regions, chunk, number, scale))
            start += count
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    # --- the end of the step --------------------------------------------------------------------

    def step_end(self, results: list[mx.array]) -> list[mx.array]:
        """Return what to evaluate so that the results are there and every append of the step has
        run."""
        return self._rows.end(results + self._tokens.newest)

    @property
    def first_rows(self) -> mx.array:
        """Return what to evaluate so that the device has something to do while the step before is
        read: all before the first attention. More would wait for room in MLX's queue."""
        return self._tokens.newest[0]

    def cancel(self) -> None:
        """Cancel the step: it failed, and nothing of it runs any more. Appends that were queued and
        have not run must not run with a later step, when their memory is gone."""
        self._tokens.newest = [mx.zeros((1,)) for _ in self._tokens.newest]
        self._rows.cancel()


def layer_regions(layout: KVLayout) -> list[LayerRegions]:
    """Return every layer's regions in the kernels' form."""
    shape, group = layout.shape, layout.group
    dtype = kv_dtype(shape)
    return [
        LayerRegions(
            keys=group.key_region(layer),
            values=group.key_region(layer) + 1,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            native=metal_ext.Layer(group.key_region(layer), group.key_region(layer) + 1, dtype),
        )
        for layer in range(shape.num_layers)
    ]


def kv_dtype(shape: KVShape) -> mx.Dtype:
    """Return the dtype of K and V."""
    if shape.itemsize == 4:
        return mx.float32
    return mx.float16 if shape.float16 else mx.bfloat16
