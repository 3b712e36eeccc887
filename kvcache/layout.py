"""Tokens <-> bytes <-> pages: the only file that knows the shape of K and V.

A *region* is the K or the V of one layer, token-major ``[token][kv_head][head_dim]``. Layers whose
rows are alike make a *group*: their regions grow together, one *block* at a time. A block is the
pages of every region of a group that hold the same ``tokens_per_block`` tokens. Blocks of all
groups hold as many tokens, each in pages of its own::

    group 0, rows of 1024 bytes   | 32 tokens: 2 pages of 16 KiB | 32 tokens: 2 pages | ...
    group 1, rows of  512 bytes   | 32 tokens: 1 page            | 32 tokens: 1 page  | ...

A recurrent layer keeps no rows, but a state of fixed size. The states of all such layers of one
sequence at one position are a *cell*::

    | state 0: matrices, rows of its convolution | state 1 | state 2 | ... | up to a whole page |
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from math import gcd, lcm

KIB = 1024
# The first one that holds 16 to 64 tokens is chosen: small rows in large pages would make blocks of
# so many tokens that short prefixes could not be shared.
PREFERRED_PAGES = (64 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 128 * KIB, 256 * KIB)
# The pages of a Metal device's placement sparse buffers, likewise.
METAL_PAGES = (64 * KIB, 16 * KIB, 256 * KIB)
MIN_TOKENS_PER_BLOCK = 16
MAX_TOKENS_PER_BLOCK = 64
FLOAT32_BYTES = 4
# Cells are whole pages of any system, and a state in a cell begins at a cache line of any.
CELL_ALIGNMENT = 16 * KIB
STATE_ALIGNMENT = 128


class LayoutError(ValueError):
    """A shape and a page size that cannot work together; the message names both figures."""


class KVFormat(Enum):
    """The number format of K and V."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"

    @property
    def itemsize(self) -> int:
        return 4 if self is KVFormat.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The rows that one layer keeps of every token: one of keys, and one of values."""

    kv_heads: int
    head_dim: int
    format: KVFormat = KVFormat.BFLOAT16

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token in one region."""
        return self.kv_heads * self.head_dim * self.format.itemsize

    def __str__(self) -> str:
        return (
            f"a token's {self.row_bytes} bytes in one region ({self.kv_heads} KV heads x "
            f"{self.head_dim} x {self.format.itemsize} bytes)"
        )


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state that one recurrent layer keeps at one position: a matrix of each value head,
    ``[value_heads][value_dim][key_dim]`` in float32, and the newest rows that its convolution reads
    again, ``[tail_rows][tail_width]``."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tail_rows: int
    format: KVFormat = KVFormat.FLOAT32
    """The number format of the convolution's rows."""

    @property
    def tail_width(self) -> int:
        """Return the length of one row: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def matrix_bytes(self) -> int:
        return FLOAT32_BYTES * self.value_heads * self.value_dim * self.key_dim

    @property
    def state_bytes(self) -> int:
        return self.matrix_bytes + self.tail_rows * self.tail_width * self.format.itemsize


@dataclass(frozen=True, slots=True)
class CellLayout:
    """The places of all recurrent layers' states in a cell."""

    states: tuple[StateSpec, ...]
    offsets: tuple[int, ...]
    """The beginning of each state, in bytes."""
    cell_bytes: int
    """A multiple of any system's page."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The memory that a model keeps of a sequence."""

    layers: tuple[KVSpec, ...]
    """Layers that keep K and V of every token."""
    states: tuple[StateSpec, ...] = ()
    """States of recurrent layers."""

    @classmethod
    def uniform(cls, num_layers: int, spec: KVSpec) -> "KVShape":
        return cls((spec,) * num_layers)

    @property
    def specs(self) -> tuple[KVSpec, ...]:
        """Return the kinds of layers, in the order of their first ones."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token in all regions."""
        return sum(2 * spec.row_bytes for spec in self.layers)

    @property
    def cell(self) -> CellLayout | None:
        """Return the layout of a cell; None where no layer keeps a state."""
        if not self.states:
            return None
        sizes = [-(-s.state_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT for s in self.states]
        *offsets, end = accumulate(sizes, initial=0)
        return CellLayout(self.states, tuple(offsets), -(-end // CELL_ALIGNMENT) * CELL_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Region:
    """The K or the V of one layer."""

    layer: int
    kind: str
    """"keys" or "values"."""
    row_bytes: int


@dataclass(frozen=True)
class Group:
    """Regions that grow and are freed together."""

    regions: tuple[Region, ...]
    page_bytes: int
    tokens_per_block: int
    blocks_per_heap: int
    blocks_per_buffer: int

    @cached_property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token in all regions of the group."""
        return sum(region.row_bytes for region in self.regions)

    @cached_property
    def block_bytes(self) -> int:
        return self.bytes_per_token * self.tokens_per_block

    @cached_property
    def heap_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_heap

    @cached_property
    def max_tokens(self) -> int:
        """Return the tokens that one sparse buffer has addresses for."""
        return self.tokens_per_block * self.blocks_per_buffer

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_block)


@dataclass(frozen=True)
class KVLayout:
    """The layout of a model's K and V. Heaps of all groups hold as many tokens, so that there are
    as many of each."""

    shape: KVShape
    groups: tuple[Group, ...]

    @cached_property
    def tokens_per_block(self) -> int:
        return self.groups[0].tokens_per_block

    @cached_property
    def max_tokens(self) -> int:
        """Return the tokens that one sequence has addresses for."""
        return self.groups[0].max_tokens

    @cached_property
    def heap_tokens(self) -> int:
        return self.tokens_per_block * self.groups[0].blocks_per_heap

    @cached_property
    def heap_bytes(self) -> int:
        """Return the bytes of a heap of each group, together."""
        return sum(group.heap_bytes for group in self.groups)

    @cached_property
    def block_bytes(self) -> int:
        """Return the bytes of a block of each group, together."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        return self.shape.bytes_per_token

    def blocks_for(self, tokens: int) -> int:
        return self.groups[0].blocks_for(tokens)

    def place(self, layer: int) -> tuple[int, int]:
        """Return the number of a layer's group, and that of the region of its keys in there; that
        of its values follows."""
        return self._places[layer]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
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
    """Return the layout of a substrate with pages.

    heap_bytes: the limit of a heap of all groups together; a heap holds one block at least.
    page_bytes: of all regions; None chooses them. device_pages: page sizes that the device can map,
    the preferred one first; None: all multiples of the system's. Raises LayoutError where a row
    does not divide the page or the page does not fit the system.
    """
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
    """Return the layout of a substrate without pages: a block is the whole context."""
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
    """Return the preferred page that a row divides and that holds 16 to 64 tokens, or the nearest
    to that. Raises LayoutError where a row divides none."""
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
    """Return the fewest tokens whose rows are whole pages in every region."""
    return lcm(
        *(system_page_bytes // gcd(system_page_bytes, spec.row_bytes) for spec in shape.specs)
    )


def checked_page(
    spec: KVSpec, page: int, system_page_bytes: int, device_pages: tuple[int, ...] | None
) -> int:
    """Return a page from the settings. Raises LayoutError where it cannot be one."""
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
    """Return the layout with a group for every kind of layer. pages: of each kind, in bytes, of
    which a block has whole ones."""
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
        )
        for spec, page in pages.items()
    )
    return KVLayout(shape, tuple(groups))
