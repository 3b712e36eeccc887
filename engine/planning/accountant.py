"""What a page size costs: memory behind the ends of sequences, against mappings and their table.

Small pages waste little and are mapped often; large ones the other way round. One block is one
page of every region.
"""

import sys
from dataclasses import dataclass

from engine.planning.devices import Device
from kvcache.block import Block
from kvcache.layout import KVLayout, KVShape, LayoutError, paged_layout

KIB = 1024
PAGE_SIZES = tuple(kib * KIB for kib in (4, 8, 16, 32, 64, 128, 256))
MEAN_LENGTHS = (256, 1024, 4096, 16384)
# An entry of the host's page table (kvcache/block.py): a reference in a list, and the
# record of the block that it refers to.
TABLE_ENTRY_BYTES = 8 + sys.getsizeof(Block(0, 0))


@dataclass(frozen=True, slots=True)
class BlockAccount:
    """One page size, for sequences of one mean length."""

    page_bytes: int
    tokens_per_block: int
    mean_tokens: int
    tail_tokens: float
    """Of the last block of a sequence, the part that holds nothing, on average."""
    waste: float
    """The same as a fraction of what is committed."""
    mappings_merged: int
    """Of a sequence of the mean length whose blocks follow each other in their heaps."""
    mappings_scattered: int
    """Of one whose blocks lie anywhere."""
    table_bytes: int
    """Of its page table on the host."""
    mapping_s_per_token: float
    """Spent on mapping, for each token that a sequence grows by."""


def account(shape: KVShape, device: Device, heap_bytes: int) -> tuple[BlockAccount, ...]:
    """Return every page size that a row divides, by every mean length; small pages first."""
    accounts = []
    for page_bytes in PAGE_SIZES:
        try:
            layout = paged_layout(
                shape,
                max_tokens=2 * max(MEAN_LENGTHS),
                heap_bytes=heap_bytes,
                system_page_bytes=PAGE_SIZES[0],
                page_bytes=page_bytes,
            )
        except LayoutError:
            continue
        accounts += [block_account(layout, page_bytes, device, mean) for mean in MEAN_LENGTHS]
    return tuple(accounts)


def block_account(
    layout: KVLayout, page_bytes: int, device: Device, mean_tokens: int
) -> BlockAccount:
    blocks = layout.blocks_for(mean_tokens)
    heaps = -(-mean_tokens // layout.heap_tokens)
    regions = sum(len(group.regions) for group in layout.groups)
    tail = tail_tokens(layout.tokens_per_block, mean_tokens)
    per_block = device.mapping_batch_s + regions * device.mapping_s
    return BlockAccount(
        page_bytes=page_bytes,
        tokens_per_block=layout.tokens_per_block,
        mean_tokens=mean_tokens,
        tail_tokens=tail,
        waste=tail / (tail + mean_tokens),
        mappings_merged=regions * heaps,
        mappings_scattered=regions * blocks,
        table_bytes=TABLE_ENTRY_BYTES * blocks * len(layout.groups),
        mapping_s_per_token=per_block / layout.tokens_per_block,
    )


def tail_tokens(tokens_per_block: int, mean_tokens: int) -> float:
    """Return the unused tokens of the last block, averaged exactly over the lengths 1 to 2 * mean -
    1, all equally likely. Half a block where sequences are long beside it; more where they are
    short."""
    lengths = 2 * mean_tokens - 1
    full, rest = divmod(lengths, tokens_per_block)
    # Lengths 1 ... t leave t - 1 ... 0 tokens; the last, broken cycle leaves only the first few.
    unused = full * (tokens_per_block * (tokens_per_block - 1) // 2)
    unused += rest * tokens_per_block - rest * (rest + 1) // 2
    return unused / lengths
