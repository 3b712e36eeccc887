"""Tokens <-> bytes <-> pages: the only file that knows the shape of K and V.

A *region* is the K or the V of one layer, token-major ``[token][kv_head][head_dim]``. The regions
of a *group* grow together, one *block* at a time: the pages of every region that hold the same
``tokens_per_block`` tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

KIB = 1024
# The default wherever it gives 16 to 64 tokens. Elsewhere the smallest that does: small rows would
# otherwise make blocks of so many tokens that short prefixes could not be shared.
PREFERRED_PAGES = (64 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 128 * KIB, 256 * KIB)
# The pages of a Metal device's placement sparse buffers, likewise.
METAL_PAGES = (64 * KIB, 16 * KIB, 256 * KIB)
MIN_TOKENS_PER_BLOCK = 16
MAX_TOKENS_PER_BLOCK = 64


class LayoutError(ValueError):
    """A shape and a page size that cannot work together; the message names both figures."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """K and V of a model, as far as memory is concerned."""

    num_layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    """Bytes of one number: 2 for bfloat16 and float16, 4 for float32."""
    float16: bool = False
    """Which of the two: on a GPU alone float16."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token in one region."""
        return self.kv_heads * self.head_dim * self.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token in all regions."""
        return 2 * self.num_layers * self.row_bytes


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
        """Return the bytes of one block: the unit of allocation."""
        return self.bytes_per_token * self.tokens_per_block

    @cached_property
    def heap_bytes(self) -> int:
        """Return the bytes of one heap."""
        return self.block_bytes * self.blocks_per_heap

    @cached_property
    def max_tokens(self) -> int:
        """Return how many tokens one sparse buffer has addresses for."""
        return self.tokens_per_block * self.blocks_per_buffer

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-tokens // self.tokens_per_block)

    def key_region(self, layer: int) -> int:
        """Return the index of a layer's keys; its values follow."""
        return 2 * layer


@dataclass(frozen=True)
class KVLayout:
    """How K and V of a model lie in memory. All layers are one group today; sliding-window layers
    or a split forced by the largest buffer of a device make more."""

    shape: KVShape
    groups: tuple[Group, ...]

    @property
    def group(self) -> Group:
        """Return the only group."""
        (group,) = self.groups
        return group


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

    heap_bytes: the size that a heap should not exceed; a heap holds one block at least.
    page_bytes: one region's part of a block; None chooses it. device_pages: those that the device
    can map, the preferred one first; None: all multiples of the system's.
    Raises LayoutError where a row does not divide the page or the page does not fit the system.
    """
    page = page_bytes
    if page is None:
        page = choose_page(shape, system_page_bytes, device_pages or PREFERRED_PAGES)
    if device_pages is not None and page not in device_pages:
        sizes = ", ".join(str(size) for size in sorted(device_pages))
        raise LayoutError(f"a page of {page} bytes is none that the device maps: {sizes} bytes")
    if page <= 0 or page % system_page_bytes:
        raise LayoutError(
            f"a page of {page} bytes is not a multiple of this system's {system_page_bytes} bytes"
        )
    if page % shape.row_bytes:
        raise LayoutError(
            f"a token's {shape.row_bytes} bytes in one region ({shape.kv_heads} KV heads x "
            f"{shape.head_dim} x {shape.itemsize} bytes) do not divide the page of {page} bytes"
        )
    tokens_per_block = page // shape.row_bytes
    block_bytes = shape.bytes_per_token * tokens_per_block
    return _one_group(
        shape,
        page_bytes=page,
        tokens_per_block=tokens_per_block,
        blocks_per_heap=max(1, heap_bytes // block_bytes),
        blocks_per_buffer=-(-max_tokens // tokens_per_block),
    )


def dense_layout(shape: KVShape, *, max_tokens: int, system_page_bytes: int) -> KVLayout:
    """Return the layout of a substrate without pages: a block is the whole context."""
    unit = tokens_of_whole_pages(shape, system_page_bytes)
    tokens = -(-max_tokens // unit) * unit
    return _one_group(
        shape,
        page_bytes=system_page_bytes,
        tokens_per_block=tokens,
        blocks_per_heap=1,
        blocks_per_buffer=1,
    )


def choose_page(
    shape: KVShape, system_page_bytes: int, preferred: tuple[int, ...] = PREFERRED_PAGES
) -> int:
    """Return the preferred page that a row divides and that makes a block of 16 to 64 tokens;
    otherwise the one that comes nearest to that.

    Raises LayoutError where a row divides none.
    """
    pages = [
        page for page in preferred if page % system_page_bytes == 0 and page % shape.row_bytes == 0
    ]
    if not pages:
        raise LayoutError(
            f"a token's {shape.row_bytes} bytes in one region ({shape.kv_heads} KV heads x "
            f"{shape.head_dim} x {shape.itemsize} bytes) divide no page from "
            f"{system_page_bytes} bytes to {max(preferred)} bytes"
        )

    def distance(page: int) -> int:
        tokens = page // shape.row_bytes
        return max(MIN_TOKENS_PER_BLOCK - tokens, tokens - MAX_TOKENS_PER_BLOCK, 0)

    return min(pages, key=distance)


def tokens_of_whole_pages(shape: KVShape, system_page_bytes: int) -> int:
    """Return the fewest tokens whose rows in one region are whole pages."""
    return system_page_bytes // gcd(system_page_bytes, shape.row_bytes)


def _one_group(
    shape: KVShape,
    *,
    page_bytes: int,
    tokens_per_block: int,
    blocks_per_heap: int,
    blocks_per_buffer: int,
) -> KVLayout:
    regions = tuple(
        Region(layer, kind, shape.row_bytes)
        for layer in range(shape.num_layers)
        for kind in ("keys", "values")
    )
    group = Group(regions, page_bytes, tokens_per_block, blocks_per_heap, blocks_per_buffer)
    return KVLayout(shape, (group,))
