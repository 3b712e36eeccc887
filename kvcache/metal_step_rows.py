"""What a Metal device's kernels do with the rows of one step."""

from collections.abc import Sequence

import mlx.core as mx

import metal_ext
from kvcache.backend import LayerRegions, Segment
from metal_ext import QKTransform

# What MLX would choose for long chunks of wide heads keeps all scores in memory; on a GPU it has a
# fused kernel for them.
SHORT_CHUNK = 8
WIDE_HEAD = 256


class MetalStepRows:
    """The GPU's kernels over a step's rows. Making it opens the step's epoch."""

    def __init__(
        self,
        segments: Sequence[Segment],
        ranges: list[metal_ext.AddressRange],
        substrate: "metal_ext.MetalSubstrate",
        *,
        contiguous: bool,
    ) -> None:
        """ranges: of all buffers, by number. contiguous: whether a region is one array there."""
        self._segments = segments
        self._ranges = ranges
        self._substrate = substrate
        self._contiguous = contiguous
        self.native = substrate.rows([(ranges[s.buffer], s.start, s.count) for s in segments])

    def append(
        self,
        token: mx.array,
        layer: LayerRegions,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        transform: QKTransform | None,
    ) -> tuple[mx.array, mx.array]:
        where = (self.native, layer.native, self._substrate)
        if transform is None:
            return metal_ext.append(token, keys, values, *where), queries
        return metal_ext.project_append(
            token, queries, keys, values, transform.norms, transform.rope, *where
        )

    def decode_attention(
        self, token: mx.array, layer: LayerRegions, queries: mx.array, scale: float
    ) -> mx.array:
        return metal_ext.decode_attention(
            token, queries, self.native, 0, layer.native, layer.kv_heads, scale, self._substrate
        )

    def chunk_attention(
        self, token: mx.array, layer: LayerRegions, queries: mx.array, segment: int, scale: float
    ) -> mx.array:
        keys, values = (
            array.transpose(1, 0, 2)[None] for array in self._past(token, layer, segment)
        )
        count, _, head_dim = queries.shape
        on_gpu = mx.default_device() == mx.Device(mx.gpu)
        attended = mx.fast.scaled_dot_product_attention(
            queries.transpose(1, 0, 2)[None],
            keys,
            values,
            scale=scale,
            mask="causal",
            force_fused=head_dim == WIDE_HEAD and count > SHORT_CHUNK and on_gpu,
        )
        return attended[0].transpose(1, 0, 2).astype(queries.dtype)

    def region(self, token: mx.array, layer: LayerRegions, kind: str, segment: int) -> mx.array:
        keys, values = self._past(token, layer, segment)
        return keys if kind == "keys" else values

    def _past(
        self, token: mx.array, layer: LayerRegions, segment: int
    ) -> tuple[mx.array, mx.array]:
        """A segment's keys and values, itself included, as ``[tokens, kv_heads, head_dim]``: a view
        where they are one array and may have been written in chunks, else a copy."""
        its = self._segments[segment]
        tokens = its.start + its.count
        if not self._contiguous or its.count == 1:
            return metal_ext.gather(
                token,
                self.native,
                segment,
                tokens,
                layer.native,
                layer.kv_heads,
                layer.head_dim,
                self._substrate,
            )
        keys, values = (
            metal_ext.region_view(
                token,
                self._ranges[its.buffer],
                region,
                tokens,
                layer.kv_heads,
                layer.head_dim,
                layer.dtype,
                self._substrate,
            )
            for region in (layer.keys, layer.values)
        )
        return keys, values

    def end(self, arrays: list[mx.array]) -> list[mx.array]:
        return [metal_ext.step_end(arrays, self.native, self._substrate)]

    def cancel(self) -> None:
        self._substrate.abandon(self.native)
