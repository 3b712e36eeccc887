"""Every integer that Python can hand to the native side, and values that it must refuse by name."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import pytest

from metal_ext import (
    AddressRange,
    CopyCounter,
    CpuWorkers,
    Heap,
    Layer,
    Mapper,
    RowTable,
    append,
    block_copy,
    chunk_attention,
    decode_attention,
    region_view,
)
from tests.metal_ext.shapes import Shape

# Rows of two heads of 32 float32.
SHAPE = Shape(rows=(256, 256))
MAPPED_BLOCKS = 4
MAPPED_TOKENS = MAPPED_BLOCKS * SHAPE.tokens_per_block

BEYOND = [-1, -(2**63), -(2**63) - 1, -(10**40)]
BEYOND += [2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**40]


class Setting:
    """Everything valid, so that one number at a time can be wrong."""

    def __init__(self) -> None:
        self.heap = Heap.shared(SHAPE.geometry())
        self.range = SHAPE.mapped(MAPPED_BLOCKS, self.heap)
        self.mapper = Mapper()
        self.workers = CpuWorkers(1)
        self.rows = RowTable([(self.range, 0, 2), (self.range, 2, 1)])
        self.layer = Layer(0, 1, mx.float32)
        self.token = mx.zeros((1,))
        self.heads = mx.zeros((2, 2, 32))

    def map(self, heap_block: int = 0, block: int = 4, count: int = 1) -> None:
        self.range.map(self.heap, heap_block, block, count, writable=True)

    def attend(self, first_row: int = 0, kv_heads: int = 2, layer: Layer | None = None) -> mx.array:
        layer = layer or self.layer
        return decode_attention(
            self.token, self.heads, self.rows, first_row, layer, kv_heads, 1.0, self.workers
        )

    def attend_chunk(self, segment: int = 0, kv_heads: int = 2) -> mx.array:
        return chunk_attention(
            self.token, self.heads, self.rows, segment, self.layer, kv_heads, 1.0, self.workers
        )

    def write(self, layer: Layer) -> mx.array:
        rows = RowTable([(self.range, 0, 2)])
        return append(self.token, self.heads, self.heads, rows, layer, self.workers)

    def view(
        self, region: int = 0, tokens: int = 1, kv_heads: int = 2, head_dim: int = 32
    ) -> mx.array:
        return region_view(self.token, self.range, region, tokens, kv_heads, head_dim, mx.float32)

    def copy(self, source_block: int = 0, target_block: int = 1, tokens: int = 1) -> mx.array:
        return block_copy(
            self.token, self.range, source_block, self.range, target_block, tokens, CopyCounter()
        )


@dataclass(frozen=True)
class Argument:
    """An integer argument: its name in an error, its interval, a call that only it can spoil."""

    name: str
    lowest: int
    highest: int
    call: Callable[[Setting, int], object]

    def numbers_outside(self) -> list[int]:
        beyond = [n for n in BEYOND if not self.lowest <= n <= self.highest]
        return [self.lowest - 1, self.highest + 1, *beyond]


BLOCKS = SHAPE.blocks_per_range
ARGUMENTS = {
    "Geometry page_bytes": Argument(
        "page_bytes", 1, 2**36, lambda s, n: SHAPE.geometry(page_bytes=n)
    ),
    "Geometry tokens_per_block": Argument(
        "tokens_per_block", 1, 2**24, lambda s, n: SHAPE.geometry(tokens_per_block=n)
    ),
    "Geometry blocks_per_heap": Argument(
        "blocks_per_heap", 1, 2**24, lambda s, n: SHAPE.geometry(blocks_per_heap=n)
    ),
    "Geometry blocks_per_range": Argument(
        "blocks_per_range", 1, 2**24, lambda s, n: SHAPE.geometry(blocks_per_range=n)
    ),
    "Geometry region_row_bytes": Argument(
        "row_bytes", 1, 2**20, lambda s, n: SHAPE.geometry(rows=(256, n))
    ),
    "map heap_block": Argument("heap blocks", 0, BLOCKS - 1, lambda s, n: s.map(heap_block=n)),
    "map block": Argument("range blocks", 0, BLOCKS - 1, lambda s, n: s.map(block=n)),
    "map count": Argument("range blocks", 1, BLOCKS - 4, lambda s, n: s.map(count=n)),
    "map ahead heap_block": Argument(
        "heap blocks", 0, BLOCKS - 1, lambda s, n: s.mapper.map(s.range, s.heap, n, 4, 1, True)
    ),
    "map ahead block": Argument(
        "range blocks", 0, BLOCKS - 1, lambda s, n: s.mapper.map(s.range, s.heap, 0, n, 1, True)
    ),
    "map ahead count": Argument(
        "range blocks", 1, BLOCKS - 4, lambda s, n: s.mapper.map(s.range, s.heap, 0, 4, n, True)
    ),
    "refused ticket": Argument("ticket", 1, 2**63 - 2, lambda s, n: s.mapper.refused(n)),
    "unmap block": Argument(
        "range blocks", 0, BLOCKS - 1, lambda s, n: s.mapper.unmap(s.range, n, 1)
    ),
    "unmap count": Argument("range blocks", 1, BLOCKS, lambda s, n: s.mapper.unmap(s.range, 0, n)),
    "release block": Argument(
        "heap blocks", 0, BLOCKS - 1, lambda s, n: s.mapper.release(s.heap, n, 1)
    ),
    "release count": Argument(
        "heap blocks", 1, BLOCKS, lambda s, n: s.mapper.release(s.heap, 0, n)
    ),
    "wait ticket": Argument("ticket", 0, 2**63 - 2, lambda s, n: s.mapper.wait(n, 0.0)),
    "CpuWorkers threads": Argument("threads", 1, 256, lambda s, n: CpuWorkers(n)),
    "RowTable start": Argument(
        "segment of mapped tokens", 0, MAPPED_TOKENS - 1, lambda s, n: RowTable([(s.range, n, 1)])
    ),
    "RowTable count": Argument(
        "segment of mapped tokens", 1, MAPPED_TOKENS, lambda s, n: RowTable([(s.range, 0, n)])
    ),
    "append key_region": Argument(
        "key_region", 0, 1, lambda s, n: s.write(Layer(n, 1, mx.float32))
    ),
    "append value_region": Argument(
        "value_region", 0, 1, lambda s, n: s.write(Layer(0, n, mx.float32))
    ),
    "decode first_row": Argument("rows of the table", 0, 1, lambda s, n: s.attend(first_row=n)),
    "decode kv_heads": Argument("kv_heads", 1, 2, lambda s, n: s.attend(kv_heads=n)),
    "decode key_region": Argument(
        "key_region", 0, 1, lambda s, n: s.attend(layer=Layer(n, 1, mx.float32))
    ),
    "decode value_region": Argument(
        "value_region", 0, 1, lambda s, n: s.attend(layer=Layer(0, n, mx.float32))
    ),
    "chunk segment": Argument(
        "segments of the table", 0, 1, lambda s, n: s.attend_chunk(segment=n)
    ),
    "chunk kv_heads": Argument("kv_heads", 1, 2, lambda s, n: s.attend_chunk(kv_heads=n)),
    "region_view region": Argument("region", 0, 1, lambda s, n: s.view(region=n)),
    "region_view tokens": Argument("tokens", 1, MAPPED_TOKENS, lambda s, n: s.view(tokens=n)),
    "region_view kv_heads": Argument("kv_heads", 1, 256, lambda s, n: s.view(kv_heads=n)),
    "region_view head_dim": Argument("head_dim", 1, 256, lambda s, n: s.view(head_dim=n)),
    "block_copy source_block": Argument(
        "source blocks", 0, MAPPED_BLOCKS - 1, lambda s, n: s.copy(source_block=n)
    ),
    "block_copy target_block": Argument(
        "target blocks", 0, MAPPED_BLOCKS - 1, lambda s, n: s.copy(target_block=n)
    ),
    "block_copy tokens": Argument("tokens", 1, 16, lambda s, n: s.copy(tokens=n)),
}


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting()


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=ARGUMENTS)
def test_threat_20_a_number_outside_its_interval_is_refused_by_name(
    setting: Setting, argument: Argument
) -> None:
    for number in argument.numbers_outside():
        with pytest.raises(IndexError, match=rf"^(mapped )?{argument.name} (is|\[)") as caught:
            argument.call(setting, number)
        if -(2**63) <= number < 2**63:
            assert str(number) in str(caught.value)
    assert setting.range.mapped_tokens == MAPPED_TOKENS
    assert setting.mapper.completed == 0, "nothing was queued"


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=ARGUMENTS)
def test_what_is_not_an_integer_is_a_type_error(setting: Setting, argument: Argument) -> None:
    for wrong in (1.0, "1", None, b"1", [1], mx.array(1.5)):
        with pytest.raises(TypeError):
            argument.call(setting, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [-0.001, 3600.001, 1e300, float("inf"), float("nan")])
def test_a_wait_is_between_nothing_and_an_hour(setting: Setting, seconds: float) -> None:
    with pytest.raises(IndexError, match="timeout_s must lie between 0 and 3600"):
        setting.mapper.wait(0, seconds)


def test_the_ends_of_every_interval_are_accepted(setting: Setting) -> None:
    assert len(RowTable([(setting.range, 0, MAPPED_TOKENS)])) == MAPPED_TOKENS
    assert len(RowTable([(setting.range, MAPPED_TOKENS - 1, 1)])) == 1
    assert setting.attend(first_row=1).shape == (2, 2, 32)
    assert setting.attend_chunk(segment=0).shape == (2, 2, 32)
    assert setting.view(region=1, tokens=MAPPED_TOKENS).shape == (MAPPED_TOKENS, 2, 32)
    assert setting.view(kv_heads=1, head_dim=64).shape == (1, 1, 64)
    assert setting.copy(MAPPED_BLOCKS - 1, 0, 16).shape == (1,)
    assert setting.mapper.wait(0, 0.0) is True
    assert setting.mapper.wait(0, 3600.0) is True


def test_a_view_is_no_longer_than_an_array_can_be() -> None:
    blocks = 128  # of 2**24 tokens of one byte
    shape = Shape(
        tokens_per_block=2**24, rows=(1,), blocks_per_heap=blocks, blocks_per_range=blocks
    )
    large = shape.mapped(blocks)
    token = mx.zeros((1,))
    assert large.mapped_tokens == 2**31
    with pytest.raises(IndexError, match="tokens is 2147483648; it must lie between 1 and"):
        region_view(token, large, 0, 2**31, 1, 1, mx.uint8)
    assert region_view(token, large, 0, 2**31 - 1, 1, 1, mx.uint8).shape == (2**31 - 1, 1, 1)


def test_a_range_of_nothing_has_no_rows() -> None:
    empty = AddressRange.sparse(SHAPE.geometry())
    with pytest.raises(IndexError, match=r"\[0, 0 \+ 1\) does not lie inside \[0, 0\)"):
        RowTable([(empty, 0, 1)])
