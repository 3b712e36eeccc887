"""What a trial writes, and looks for."""

import numpy as np
from numpy.typing import NDArray

from kvcache.layout import KVShape

QUERIES_PER_HEAD = 3


class Pattern:
    """Rows of numbers that bfloat16 keeps exactly, and queries that look for single ones."""

    def __init__(self, tokens: int, shape: KVShape) -> None:
        random = np.random.default_rng(7)
        (spec,) = shape.specs
        self._kv_heads = spec.kv_heads
        size = (2 * len(shape.layers), tokens, spec.kv_heads, spec.head_dim)
        self.regions = (random.integers(-63, 64, size) / 64).astype(np.float32)

    def queries(self, layer: int, start: int, count: int) -> NDArray[np.float32]:
        """``[count, query_heads, head_dim]``: each is the key of a position up to its own."""
        positions = start + np.arange(count)[:, None]
        heads = np.arange(QUERIES_PER_HEAD * self._kv_heads)[None]
        sought = (positions * 7919 + heads * 104729) % (positions + 1)
        found: NDArray[np.float32] = self.regions[2 * layer][sought, heads // QUERIES_PER_HEAD]
        return found
