"""Sequences' K and V as each kind of backend keeps them, with nothing behind their last block."""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.metal.kernels.device import dtype
from tests.metal.kernels.formats import Floats, Format, Stored
from tests.metal.kernels.memory import PAGE, Addresses

KINDS = ("sparse", "dense", "paged")
LAYERS = 3  # regions 2 l and 2 l + 1 hold K and V of layer l
LAYER = 1  # the one that kernels are run on
BLOCKS_PER_EXTENT = 3


class KVStore:
    """Memory for whole blocks of each sequence, all NaN until it is written.

    sparse: a run of addresses per sequence, memory behind its leading blocks. dense: the same, all
    in one buffer. paged: blocks strewn over extents, none beside its neighbour.
    """

    def __init__(
        self, kind: str, lengths: Sequence[int], kv_heads: int, head_dim: int, number: Format
    ) -> None:
        self.kind, self.lengths = kind, tuple(lengths)
        self.kv_heads, self.head_dim, self.number = kv_heads, head_dim, number
        self.row_elements = kv_heads * head_dim
        self.row_bytes = self.row_elements * number.bytes
        assert PAGE % self.row_bytes == 0
        self.tokens_per_block = max(PAGE // self.row_bytes, 4)
        assert self.tokens_per_block.bit_count() == 1
        self._block_bytes = self.tokens_per_block * self.row_bytes
        self._blocks = [-(-length // self.tokens_per_block) for length in self.lengths]
        self._paged() if kind == "paged" else self._contiguous()

    def _contiguous(self) -> None:
        # One block more than the longest needs: it stays without memory.
        self._region_bytes = (max(self._blocks) + 1) * self._block_bytes
        range_bytes = 2 * LAYERS * self._region_bytes
        self._memory = Addresses(range_bytes * len(self.lengths))
        self._starts = [self._memory.start + i * range_bytes for i in range(len(self.lengths))]
        for start, blocks in zip(self._starts, self._blocks, strict=True):
            for region in range(2 * LAYERS):
                offset = start - self._memory.start + region * self._region_bytes
                self._memory.give(offset, blocks * self._block_bytes)
        self.pages = np.zeros(1, np.uint64)

    def _paged(self) -> None:
        # Region-major extents; before every block of a region lies one that has no memory.
        self._region_bytes = 2 * BLOCKS_PER_EXTENT * self._block_bytes
        extent_bytes = 2 * LAYERS * self._region_bytes
        extents = -(-sum(self._blocks) // BLOCKS_PER_EXTENT)
        self._memory = Addresses(extent_bytes * extents)
        slots = [(e, b) for e in range(extents) for b in range(BLOCKS_PER_EXTENT)]
        random.Random(1).shuffle(slots)
        addresses = []
        for extent, block in slots[: sum(self._blocks)]:
            offset = extent * extent_bytes + (2 * block + 1) * self._block_bytes
            addresses.append(self._memory.start + offset)
            for region in range(2 * LAYERS):
                self._memory.give(offset + region * self._region_bytes, self._block_bytes)
        self.pages = np.array(addresses, np.uint64)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """The members of LayerPlace."""
        key = 2 * LAYER * self._region_bytes
        # Nothing else than paged rows may depend on the size of blocks.
        shift = self.tokens_per_block.bit_length() - 1 if self.kind == "paged" else 31
        return (key, key + self._region_bytes, self.row_bytes, shift)

    @property
    def arena(self) -> int:
        """The address that is bound as the arena."""
        return self._memory.start

    def entries(self, rows: Sequence[tuple[int, int]]) -> NDArray[np.void]:
        """The row table for (sequence, position) pairs."""
        table = np.zeros(len(rows), dtype("RowEntry"))
        for entry, (sequence, position) in zip(table, rows, strict=True):
            entry["position"] = position
            if self.kind == "paged":
                entry["first_page"] = sum(self._blocks[:sequence])
            else:
                start = self._starts[sequence]
                entry["base"] = start if self.kind == "sparse" else start - self._memory.start
        return table

    def _block(self, sequence: int, which: int, block: int) -> NDArray[np.uint8]:
        region = (2 * LAYER + which) * self._region_bytes
        if self.kind == "paged":
            address = int(self.pages[sum(self._blocks[:sequence]) + block]) + region
        else:
            address = self._starts[sequence] + region + block * self._block_bytes
        return Addresses.bytes_at(address, self._block_bytes)

    def rows(self, sequence: int, which: int) -> Stored:
        """All rows of a sequence that have memory, K (0) or V (1): [rows][kv_heads][head_dim]."""
        blocks = [self._block(sequence, which, b) for b in range(self._blocks[sequence])]
        stored = np.concatenate(blocks).view(self.number.dtype)
        return stored.reshape(-1, self.kv_heads, self.head_dim)

    def write(self, sequence: int, which: int, rows: Floats) -> None:
        """Rows from position 0 on: [rows][kv_heads][head_dim]."""
        self.write_stored(sequence, which, self.number.encode(rows))

    def write_stored(self, sequence: int, which: int, rows: Stored) -> None:
        """The same for rows in the store's own format."""
        new = self.rows(sequence, which)
        new[: len(rows)] = rows
        for block, part in enumerate(np.split(new, self._blocks[sequence])):
            self._block(sequence, which, block)[:] = part.reshape(-1).view(np.uint8)

    def everything(self) -> bytes:
        """All memory of all layers, for comparisons."""
        parts = []
        for sequence, blocks in enumerate(self._blocks):
            for block in range(blocks):
                for which in range(-2 * LAYER, 2 * LAYERS - 2 * LAYER):
                    parts.append(self._block(sequence, which, block).tobytes())
        return b"".join(parts)
