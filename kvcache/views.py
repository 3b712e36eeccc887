"""What a model layer sees of the cache during one step: append rows, attend to them."""

from collections.abc import Sequence

import mlx.core as mx

import metal_ext
from kvcache.backend import PageBackend, Segment
from kvcache.layout import KVLayout, KVShape


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
        layout: KVLayout,
        tokens: CacheTokens,
        backend: PageBackend,
        segments: Sequence[Segment],
        workers: metal_ext.CpuWorkers,
        epoch: int,
    ) -> None:
        """epoch: the number that this step's completion will have."""
        counts = [segment.count for segment in segments]
        self.epoch = epoch
        self.segments = tuple(segments)
        self._layout = layout
        self._shape = layout.shape
        self._layers = native_layers(layout)
        self._tokens = tokens
        self._backend = backend
        self._rows = backend.row_table(segments)
        self._workers = workers
        self._decode_rows = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        self._chunks = list(counts[self._decode_rows :])

    @property
    def cache_tokens(self) -> list[mx.array]:
        """One array per layer: evaluating them runs every append of the step."""
        return self._tokens.newest

    def give_up(self) -> None:
        """The step failed, and nothing of it runs any more: appends that were queued and have not
        run must not run with a later step, when their memory is gone."""
        self._tokens.newest = [mx.zeros((1,)) for _ in self._tokens.newest]

    def append(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Writes this step's keys and values, ``[T, kv_heads, head_dim]`` each."""
        self._tokens.newest[layer] = metal_ext.append(
            self._tokens.newest[layer], keys, values, self._rows, self._layers[layer], self._workers
        )

    def attend(self, layer: int, queries: mx.array, scale: float) -> mx.array:
        """Attention of ``[T, query_heads, head_dim]``, each row over its sequence up to itself."""
        token, view = self._tokens.newest[layer], self._layers[layer]
        split = self._decode_rows
        parts: list[mx.array] = []
        if split:
            decoding = queries[:split] if self._chunks else queries
            parts.append(
                metal_ext.decode_attention(
                    token, decoding, self._rows, 0, view, self._shape.kv_heads, scale, self._workers
                )
            )
        start = split
        for number, count in enumerate(self._chunks, split):
            chunk = queries[start : start + count] if len(queries) != count else queries
            parts.append(
                metal_ext.chunk_attention(
                    token,
                    chunk,
                    self._rows,
                    number,
                    view,
                    self._shape.kv_heads,
                    scale,
                    self._workers,
                )
            )
            start += count
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def region(self, layer: int, kind: str, number: int) -> mx.array:
        """Keys or values of a segment's whole past, itself included: the flat array that they are,
        ``[start + count, kv_heads, head_dim]``, not copied, valid until the sequence closes."""
        segment, shape = self.segments[number], self._shape
        group = self._layout.group
        return metal_ext.region_view(
            self._tokens.newest[layer],
            self._backend.address_range(segment.buffer),
            group.key_region(layer) + (kind == "values"),
            segment.start + segment.count,
            shape.kv_heads,
            shape.head_dim,
            kv_dtype(shape),
        )


def native_layers(layout: KVLayout) -> list[metal_ext.Layer]:
    """The regions of each layer, as the primitives want them."""
    dtype = kv_dtype(layout.shape)
    group = layout.group
    return [
        metal_ext.Layer(group.key_region(layer), group.key_region(layer) + 1, dtype)
        for layer in range(layout.shape.num_layers)
    ]


def kv_dtype(shape: KVShape) -> mx.Dtype:
    """What K and V are kept as."""
    return mx.bfloat16 if shape.itemsize == 2 else mx.float32
