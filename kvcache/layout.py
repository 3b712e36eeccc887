"""Sizes and places of K, V and recurrent states in memory, and the choice of page sizes.

A *region* is the K or the V of one layer, ``[token][kv_head][head_dim]``. Layers whose K and V have
equal shapes form a *group*. A *block* is the memory of the same ``tokens_per_block`` tokens in all
regions of a group. Groups differ in their page sizes, but not in the number of tokens per block::

    group 0, rows of 1024 bytes   | 32 tokens: 2 pages of 16 KiB | 32 tokens: 2 pages | ...
    group 1, rows of  512 bytes   | 32 tokens: 1 page            | 32 tokens: 1 page  | ...

A recurrent layer keeps a state of fixed size instead of K and V. A *slot* holds the states of all
recurrent layers of one sequence at one position, padded to whole pages."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from math import gcd, lcm

KIB = 1024
# Page sizes by preference. The first one that holds 16 to 64 tokens is used. With more tokens in a
# block, sequences could not share short prefixes, because they share whole blocks.
PREFERRED_PAGES = (64 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 128 * KIB, 256 * KIB)
# The page sizes of sparse buffers on a Metal device, by preference.
METAL_PAGES = (64 * KIB, 16 * KIB, 256 * KIB)
MIN_TOKENS_PER_BLOCK = 16
MAX_TOKENS_PER_BLOCK = 64
FLOAT32_BYTES = 4
# The size of a slot is a multiple of this, so that a slot fills whole pages on every system.
SLOT_ALIGNMENT = 16 * KIB
STATE_ALIGNMENT = 128


class LayoutError(ValueError):
    """A shape of K and V does not fit the page size. The message names both figures."""


class KVFormat(Enum):
    """A number format of K and V."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        return 4 if self is KVFormat.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The shape of the rows that a layer keeps for each token: one of keys and one of values."""

    kv_heads: int
    head_dim: int
    format: KVFormat = KVFormat.BFLOAT16
    window: int = 0
    """The number of newest tokens that a token attends to, itself included; 0 means all."""

    @property
    def row_bytes(self) -> int:
        return self.kv_heads * self.head_dim * self.format.itemsize

    def __str__(self) -> str:
        return (
            f"a token's {self.row_bytes} bytes in one region ({self.kv_heads} KV heads x "
            f"{self.head_dim} x {self.format.itemsize} bytes)"
        )


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The shape of a recurrent layer's state: a float32 matrix
    ``[value_heads][value_dim][key_dim]``, then the newest rows of the convolution's input,
    ``[tail_rows][tail_width]``."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tail_rows: int
    format: KVFormat = KVFormat.FLOAT32

    @property
    def tail_width(self) -> int:
        """The length of an input row of the convolution, which holds queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def matrix_bytes(self) -> int:
        return FLOAT32_BYTES * self.value_heads * self.value_dim * self.key_dim

    @property
    def state_bytes(self) -> int:
        return self.matrix_bytes + self.tail_rows * self.tail_width * self.format.itemsize


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The place of each recurrent layer's state within a slot."""

    states: tuple[StateSpec, ...]
    offsets: tuple[int, ...]
    """The offset of each recurrent layer's state from the start of the slot, in bytes."""
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shapes of the K, V and recurrent states that a model keeps for one sequence."""

    layers: tuple[KVSpec, ...]
    """One KVSpec per layer that keeps K and V. Recurrent layers are left out."""
    states: tuple[StateSpec, ...] = ()
    hidden_size: int = 0
    """The size of the hidden states that a model with a head for drafts keeps, or 0."""

    @classmethod
    def uniform(cls, num_layers: int, spec: KVSpec) -> "KVShape":
        return cls((spec,) * num_layers)

    @property
    def specs(self) -> tuple[KVSpec, ...]:
        """The distinct shapes among ``layers``: those without a window, then the others, each in
        the order of their first layers."""
        return tuple(sorted(dict.fromkeys(self.layers), key=lambda spec: spec.window > 0))

    @property
    def bytes_per_token(self) -> int:
        return sum(2 * spec.row_bytes for spec in self.layers)

    @property
    def lasting_bytes_per_token(self) -> int:
        """The bytes of a token that is older than all windows."""
        return sum(2 * spec.row_bytes for spec in self.layers if not spec.window)

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of K and V that a sequence keeps between two steps."""
        return sum(2 * spec.row_bytes * min(tokens, spec.window or tokens) for spec in self.layers)

    def without_windows(self) -> "KVShape":
        return replace(self, layers=tuple(replace(spec, window=0) for spec in self.layers))

    @property
    def slot(self) -> SlotLayout | None:
        """The layout of a state slot, or None if the model has no recurrent layers."""
        if not self.states:
            return None
        sizes = [-(-s.state_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT for s in self.states]
        *offsets, end = accumulate(sizes, initial=0)
        return SlotLayout(self.states, tuple(offsets), -(-end // SLOT_ALIGNMENT) * SLOT_ALIGNMENT)

    @property
    def slot_bytes(self) -> int:
        """The size of a state slot, or 0 if the model has no recurrent layers."""
        return 0 if self.slot is None else self.slot.slot_bytes


@dataclass(frozen=True, slots=True)
class Region:
    """The K or the V of one layer. ``kind`` is "keys" or "values"."""

    layer: int
    kind: str
    row_bytes: int


@dataclass(frozen=True)
class Group:
    """The K and V of all layers whose rows have the same shape. They are mapped together."""

    regions: tuple[Region, ...]
    page_bytes: int
    tokens_per_block: int
    blocks_per_heap: int
    blocks_per_buffer: int
    window: int = 0
    """See KVSpec."""
    useful_blocks: int | None = None
    """The number of blocks that all sequences and their prefixes can use, or None for any."""
    ring_blocks: int = 0
    """The number of blocks in a buffer's ring of addresses (metal_ext/csrc/core/geometry.h). 0 is
    for buffers with an address for each block of a context."""

    @cached_property
    def bytes_per_token(self) -> int:
        return sum(region.row_bytes for region in self.regions)

    @cached_property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.tokens_per_block

    @cached_property
    def heap_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_heap

    @cached_property
    def max_tokens(self) -> int:
        """The number of tokens that fit into the addresses of one sparse buffer."""
        return self.tokens_per_block * self.blocks_per_buffer

    @cached_property
    def has_ring(self) -> bool:
        return 0 < 2 * self.ring_blocks < self.blocks_per_buffer

    @cached_property
    def most_mapped(self) -> int:
        """The most blocks that may be mapped in a buffer at one time."""
        return self.ring_blocks if self.has_ring else self.blocks_per_buffer

    @cached_property
    def address_bytes(self) -> int:
        return self.block_bytes * self.most_mapped * (2 if self.has_ring else 1)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block)

    def with_ring(self, step_tokens: int) -> "Group":
        """Return the group with the shortest ring: for the most blocks that a sequence needs, or
        for two windows, which a sequence has while it goes on behind blocks of others."""
        tokens = self.window + max(self.window, step_tokens)
        return replace(self, ring_blocks=self.blocks_for(tokens) + 2)

    def kept_blocks(self, tokens: int) -> int:
        """Return the number of blocks that a sequence of ``tokens`` keeps between two steps."""
        return self.most_blocks(tokens, 0)

    def most_blocks(self, tokens: int, step_tokens: int) -> int:
        """Return the most blocks that a sequence of ``tokens`` needs at one time, if steps compute
        ``step_tokens`` or fewer. A window and a step's tokens may begin and end within a block."""
        window = self.blocks_for(self.window + step_tokens) + 2 if self.window else tokens
        return min(self.blocks_for(tokens), window)


@dataclass(frozen=True)
class KVLayout:
    """The layout of a model's K and V. The heaps of all groups hold the same number of tokens."""

    shape: KVShape
    groups: tuple[Group, ...]

    @cached_property
    def tokens_per_block(self) -> int:
        return self.groups[0].tokens_per_block

    @cached_property
    def max_tokens(self) -> int:
        return self.groups[0].max_tokens

    @cached_property
    def heap_tokens(self) -> int:
        return self.tokens_per_block * self.groups[0].blocks_per_heap

    @cached_property
    def heap_bytes(self) -> int:
        """The size of a heap, summed over all groups."""
        return sum(group.heap_bytes for group in self.groups)

    @cached_property
    def block_bytes(self) -> int:
        """The size of a block, summed over all groups."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        return self.shape.bytes_per_token

    def shortened(self, max_tokens: int) -> "KVLayout":
        """Return a layout with pages whose buffers are for at most ``max_tokens``."""
        blocks = self.blocks_for(max_tokens)
        groups = [replace(group, blocks_per_buffer=blocks) for group in self.groups]
        return replace(self, groups=tuple(groups))

    @cached_property
    def address_bytes(self) -> int:
        return sum(group.address_bytes for group in self.groups)

    def blocks_for(self, tokens: int) -> int:
        return self.groups[0].blocks_for(tokens)

    def bytes_for(self, tokens: int, step_tokens: int) -> int:
        """Return the bytes of the most blocks that a sequence of ``tokens`` needs at one time."""
        return self.bytes_of([group.most_blocks(tokens, step_tokens) for group in self.groups])

    def tokens_within(self, budget_bytes: int, step_tokens: int) -> int:
        """Return the number of tokens that fit into the whole heaps of a budget."""
        return self.tokens_in(self.heap_blocks_within(budget_bytes), step_tokens)

    def tokens_in(self, blocks: Sequence[int], step_tokens: int) -> int:
        """Return the number of tokens that fit into a number of blocks of each group. Windows limit
        it only where one of them does not fit."""
        limiting = [
            count
            for count, group in zip(blocks, self.groups, strict=True)
            if not group.window or count < group.most_blocks(self.max_tokens, step_tokens)
        ]
        return min(limiting) * self.tokens_per_block if limiting else self.max_tokens

    def heap_blocks_within(self, budget_bytes: int) -> list[int]:
        """Return the number of blocks of each group in the whole heaps that fit into a budget."""
        return self.blocks_within(budget_bytes, multiple=self.groups[0].blocks_per_heap)

    def blocks_within(self, budget_bytes: int, *, multiple: int = 1) -> list[int]:
        """Return the number of blocks of each group that fit into a budget, a multiple of
        ``multiple``. All groups have equal numbers, but none has more than its useful blocks."""

        def counts(blocks: int) -> list[int]:
            return [min(blocks, group.useful_blocks or blocks) for group in self.groups]

        end = budget_bytes // min(group.block_bytes for group in self.groups) + 1
        multiples = range(multiple, end, multiple)
        return counts(
            multiple * bisect_right(multiples, budget_bytes, key=lambda n: self.bytes_of(counts(n)))
        )

    def bytes_of(self, blocks: Sequence[int]) -> int:
        """Return the bytes of a number of blocks of each group."""
        sizes = zip(blocks, self.groups, strict=True)
        return sum(count * group.block_bytes for count, group in sizes)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Two indices for each layer: of its group, and of the region with the layer's keys. The
        next region has the values."""
        return {
            region.layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, region in enumerate(group.regions)
            if region.kind == "keys"
        }


def paged_layout(
    shape: KVShape,
    *,
    max_tokens: int,
    heap_bytes: int,
    system_page_bytes: int,
    page_bytes: int | None = None,
    device_pages: tuple[int, ...] | None = None,
) -> KVLayout:
    """Return the layout of a KV backend with pages. Raises LayoutError if no page size fits.
    ``heap_bytes`` limits the size of a heap, summed over all groups, but a heap holds at least one
    block. ``page_bytes`` is the page size of all regions, or None to choose sizes. ``device_pages``
    are the page sizes that the device can map, the preferred size first; None allows all multiples
    of the system's page size."""
    pages = {
        spec: checked_page(spec, page_bytes, system_page_bytes, device_pages)
        if page_bytes is not None
        else choose_page(spec, system_page_bytes, device_pages or PREFERRED_PAGES)
        for spec in shape.specs
    }
    tokens_per_block = lcm(*(page // spec.row_bytes for spec, page in pages.items()))
    return grouped_layout(
        shape,
        pages,
        tokens_per_block=tokens_per_block,
        blocks_per_heap=max(1, heap_bytes // (shape.bytes_per_token * tokens_per_block)),
        blocks_per_buffer=-(-max_tokens // tokens_per_block),
    )


def dense_layout(shape: KVShape, *, max_tokens: int, system_page_bytes: int) -> KVLayout:
    """Return the layout of a KV backend without pages. A block holds a whole context, so that
    windows save nothing."""
    shape = shape.without_windows()
    unit = tokens_of_whole_pages(shape, system_page_bytes)
    return grouped_layout(
        shape,
        dict.fromkeys(shape.specs, system_page_bytes),
        tokens_per_block=-(-max_tokens // unit) * unit,
        blocks_per_heap=1,
        blocks_per_buffer=1,
    )


def choose_page(
    spec: KVSpec, system_page_bytes: int, preferred: tuple[int, ...] = PREFERRED_PAGES
) -> int:
    """Return the first preferred page size that holds 16 to 64 whole rows, or else the one nearest
    to this range. Raises LayoutError if no page size holds whole rows."""
    pages = [
        page for page in preferred if page % system_page_bytes == 0 and page % spec.row_bytes == 0
    ]
    if not pages:
        raise LayoutError(
            f"{spec} divide no page from {system_page_bytes} bytes to {max(preferred)} bytes"
        )

    def distance(page: int) -> int:
        tokens = page // spec.row_bytes
        return max(MIN_TOKENS_PER_BLOCK - tokens, tokens - MAX_TOKENS_PER_BLOCK, 0)

    return min(pages, key=distance)


def tokens_of_whole_pages(shape: KVShape, system_page_bytes: int) -> int:
    """Return the smallest number of tokens whose rows fill whole pages in every region."""
    return lcm(
        *(system_page_bytes // gcd(system_page_bytes, spec.row_bytes) for spec in shape.specs)
    )


def checked_page(
    spec: KVSpec, page: int, system_page_bytes: int, device_pages: tuple[int, ...] | None
) -> int:
    """Return ``page``, a size that the user has set. Raises LayoutError if it does not fit."""
    if device_pages is not None and page not in device_pages:
        sizes = ", ".join(str(size) for size in sorted(device_pages))
        raise LayoutError(f"a page of {page} bytes is none that the device maps: {sizes} bytes")
    if page <= 0 or page % system_page_bytes:
        raise LayoutError(
            f"a page of {page} bytes is not a multiple of this system's {system_page_bytes} bytes"
        )
    if page % spec.row_bytes:
        raise LayoutError(f"{spec} do not divide the page of {page} bytes")
    return page


def grouped_layout(
    shape: KVShape,
    pages: dict[KVSpec, int],
    *,
    tokens_per_block: int,
    blocks_per_heap: int,
    blocks_per_buffer: int,
) -> KVLayout:
    """Return a layout with one group per KVSpec. ``pages`` has the page bytes for each KVSpec."""
    groups = (
        Group(
            tuple(
                Region(layer, kind, spec.row_bytes)
                for layer, own in enumerate(shape.layers)
                if own == spec
                for kind in ("keys", "values")
            ),
            page,
            tokens_per_block,
            blocks_per_heap,
            blocks_per_buffer,
            spec.window,
        )
        for spec, page in pages.items()
    )
    return KVLayout(shape, tuple(groups))
