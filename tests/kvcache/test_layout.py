import pytest

from kvcache.layout import (
    KIB,
    METAL_PAGES,
    KVFormat,
    KVShape,
    KVSpec,
    LayoutError,
    StateSpec,
    choose_page,
    dense_layout,
    paged_layout,
)

QWEN3_4B = KVShape.uniform(36, KVSpec(8, 128))
DEMO = KVShape.uniform(5, KVSpec(2, 64))
MIB = 1024 * KIB


def test_the_geometry_of_qwen3_4b_is_that_of_the_design() -> None:
    layout = paged_layout(
        QWEN3_4B, max_tokens=40960, heap_bytes=64 * MIB, system_page_bytes=4 * KIB
    )
    group = layout.groups[0]
    assert group.page_bytes == 64 * KIB
    assert group.tokens_per_block == 32
    assert len(group.regions) == 72
    assert QWEN3_4B.bytes_per_token == group.bytes_per_token == 144 * KIB
    assert group.block_bytes == 4.5 * MIB
    assert group.blocks_per_heap == 14
    assert group.heap_bytes == 63 * MIB
    assert group.blocks_per_buffer == 1280
    assert group.max_tokens == 40960


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_of_a_metal_device_hold_a_power_of_two_tokens(kv_heads: int, head_dim: int) -> None:
    """A page divided by rows is a power of two there; the kernels find tokens by it."""
    wide, narrow = KVSpec(kv_heads, head_dim), KVSpec(1, 64)
    layout = paged_layout(
        KVShape((wide, narrow)),
        max_tokens=1000,
        heap_bytes=MIB,
        system_page_bytes=min(METAL_PAGES),
        device_pages=METAL_PAGES,
    )
    assert layout.tokens_per_block.bit_count() == 1
    with pytest.raises(LayoutError, match="divide no page"):
        choose_page(KVSpec(3, head_dim), min(METAL_PAGES), METAL_PAGES)


def test_regions_alternate_keys_and_values_layer_by_layer() -> None:
    layout = paged_layout(DEMO, max_tokens=64, heap_bytes=MIB, system_page_bytes=4096)
    (group,) = layout.groups
    assert [(r.layer, r.kind) for r in group.regions[:4]] == [
        (0, "keys"),
        (0, "values"),
        (1, "keys"),
        (1, "values"),
    ]
    assert layout.places[3] == (0, 6)


@pytest.mark.parametrize(
    ("row_bytes", "system_page", "page"),
    [
        (2048, 4 * KIB, 64 * KIB),  # 32 tokens
        (1024, 4 * KIB, 64 * KIB),  # 64 tokens, at the edge
        (4096, 4 * KIB, 64 * KIB),  # 16 tokens, at the other
        (256, 4 * KIB, 4 * KIB),  # small rows get small pages
        (512, 4 * KIB, 8 * KIB),
        (256, 16 * KIB, 16 * KIB),  # a Mac's page is the least
        (8192, 4 * KIB, 128 * KIB),  # large rows get large ones
        (16384, 4 * KIB, 256 * KIB),
        (32768, 4 * KIB, 256 * KIB),  # 8 tokens: nearest to 16
        (64, 16 * KIB, 16 * KIB),  # 256 tokens: nearest to 64
    ],
)
def test_the_page_gives_sixteen_to_sixty_four_tokens_where_it_can(
    row_bytes: int, system_page: int, page: int
) -> None:
    shape = KVShape.uniform(1, KVSpec(1, row_bytes // 2))
    assert choose_page(shape.layers[0], system_page) == page


def test_a_row_that_divides_no_page_is_refused_with_its_figures() -> None:
    shape = KVShape.uniform(1, KVSpec(3, 64))
    with pytest.raises(LayoutError, match=r"384 bytes .*3 KV heads x 64 x 2 bytes.*no page"):
        choose_page(shape.layers[0], 4096)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (6000, "not a multiple of this system's 4096"),
        (0, "not a multiple"),
        (-4096, "not a multiple"),
        (8192, "do not divide the page of 8192 bytes"),
    ],
)
def test_a_page_that_does_not_suit_is_refused(page: int, message: str) -> None:
    shape = KVShape.uniform(1, KVSpec(3, 64))
    with pytest.raises(LayoutError, match=message):
        paged_layout(shape, max_tokens=10, heap_bytes=MIB, system_page_bytes=4096, page_bytes=page)


@pytest.mark.parametrize(
    ("row_bytes", "page"),
    [
        (2048, 64 * KIB),  # 32 tokens
        (256, 16 * KIB),  # 64 tokens
        (8192, 256 * KIB),  # 32 tokens
        (128, 16 * KIB),  # 128 tokens: nearest to 64
    ],
)
def test_a_device_has_pages_of_its_own(row_bytes: int, page: int) -> None:
    shape = KVShape.uniform(1, KVSpec(1, row_bytes // 2))
    layout = paged_layout(
        shape, max_tokens=100, heap_bytes=MIB, system_page_bytes=16 * KIB, device_pages=METAL_PAGES
    )
    assert layout.groups[0].page_bytes == page


def test_a_heap_holds_one_block_at_least() -> None:
    layout = paged_layout(QWEN3_4B, max_tokens=100, heap_bytes=1, system_page_bytes=4096)
    assert layout.groups[0].blocks_per_heap == 1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (32, 1), (33, 2), (64, 2)])
def test_blocks_cover_their_tokens_exactly(tokens: int, blocks: int) -> None:
    group = paged_layout(QWEN3_4B, max_tokens=100, heap_bytes=MIB, system_page_bytes=4096).groups[0]
    assert group.blocks_for(tokens) == blocks


def test_a_dense_block_is_the_whole_context_in_whole_system_pages() -> None:
    group = dense_layout(DEMO, max_tokens=1000, system_page_bytes=4096).groups[0]
    assert group.blocks_per_buffer == group.blocks_per_heap == 1
    assert group.tokens_per_block == 1008  # 256-byte rows: sixteen to a page
    assert group.blocks_for(1000) == 1


def test_layers_that_keep_rows_of_their_own_shape_are_a_group_with_pages_of_its_own() -> None:
    wide, narrow = KVSpec(8, 128), KVSpec(1, 64)
    shape = KVShape((wide, narrow, wide, wide))
    layout = paged_layout(shape, max_tokens=1000, heap_bytes=MIB, system_page_bytes=4 * KIB)
    assert [group.page_bytes for group in layout.groups] == [64 * KIB, 4 * KIB]
    assert {group.tokens_per_block for group in layout.groups} == {32}
    assert [len(group.regions) for group in layout.groups] == [6, 2]
    assert [layout.places[layer] for layer in range(4)] == [(0, 0), (1, 0), (0, 2), (0, 4)]
    assert layout.bytes_per_token == 3 * 2 * 2048 + 2 * 128
    assert layout.heap_bytes <= MIB < layout.heap_bytes + layout.block_bytes
    assert layout.heap_bytes == layout.heap_tokens * layout.bytes_per_token
    assert (layout.blocks_for(33), layout.max_tokens) == (2, 1024)


def test_states_of_recurrent_layers_lie_in_a_slot_of_whole_pages() -> None:
    narrow = StateSpec(1, 2, 16, 16, tail_rows=3)
    wide = StateSpec(2, 4, 128, 128, tail_rows=3, format=KVFormat.BFLOAT16)
    slot = KVShape((), (narrow, wide, narrow)).slot
    assert slot is not None
    assert narrow.state_bytes == 4 * 2 * 16 * 16 + 3 * 64 * 4
    assert wide.state_bytes == 4 * 4 * 128 * 128 + 3 * 1024 * 2
    ends = [at + its.state_bytes for at, its in zip(slot.offsets, slot.states, strict=True)]
    assert all(end <= start for end, start in zip(ends, slot.offsets[1:], strict=False))
    assert all(start % 128 == 0 for start in slot.offsets)
    assert slot.slot_bytes % 16384 == 0
    assert ends[-1] <= slot.slot_bytes < ends[-1] + 16384
    assert KVShape((KVSpec(1, 64),)).slot is None


@pytest.mark.parametrize(
    ("tokens", "kept", "most"), [(10, 1, 1), (64, 4, 4), (100, 7, 7), (200, 10, 13), (9999, 10, 17)]
)
def test_a_sequence_needs_blocks_for_a_window_and_a_step(tokens: int, kept: int, most: int) -> None:
    """The window has 128 tokens, and a step computes 100."""
    shape = KVShape.uniform(2, KVSpec(4, 64, KVFormat.FLOAT32, window=128))
    layout = paged_layout(
        shape, max_tokens=10_000, heap_bytes=1 << 20, system_page_bytes=4096, page_bytes=16384
    )
    (group,) = layout.groups
    assert (group.kept_blocks(tokens), group.most_blocks(tokens, 100)) == (kept, most)
    assert layout.bytes_for(tokens, 100) == most * group.block_bytes
    assert shape.bytes_of(tokens) == min(tokens, 128) * shape.bytes_per_token
