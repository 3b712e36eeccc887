"""Every integer that Python can hand to the native side, and values that it must refuse by name;
and whatever else somebody might hand over where a number or an array belongs."""

import re
from functools import partial

import mlx.core as mx
import pytest

from metal_ext import AddressRange, RopeTable, RowTable, region_view, rope_angles
from tests.metal_ext.arguments import (
    BEYOND,
    INTEGERS,
    INTERVALS,
    MAPPED_BLOCKS,
    MAPPED_TOKENS,
    SHAPE,
    Setting,
    attempt,
    places_of,
)
from tests.metal_ext.programs import run_program
from tests.metal_ext.shapes import Shape


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting()


@pytest.mark.parametrize("place", INTERVALS)
def test_threat_20_a_number_outside_its_interval_is_refused_by_name(
    setting: Setting, place: str
) -> None:
    name, lowest, highest = INTERVALS[place]
    beyond = [number for number in BEYOND if not lowest <= number <= highest]
    for number in (lowest - 1, highest + 1, *beyond):
        with pytest.raises(IndexError, match=rf"^(mapped )?{name} (is|\[)") as caught:
            setting.call(place, number)
        if -(2**63) <= number < 2**63:
            assert str(number) in str(caught.value)
    assert setting.range.mapped_tokens == MAPPED_TOKENS
    assert setting.mapper.completed == 0, "nothing was queued"


@pytest.mark.parametrize("place", INTEGERS)
def test_what_is_not_an_integer_is_a_type_error(setting: Setting, place: str) -> None:
    for wrong in (1.0, "1", None, b"1", [1], mx.array(1.5)):
        if wrong is None and place == "Softmax(window)":
            continue  # which means all positions
        with pytest.raises(TypeError):
            setting.call(place, wrong)


def test_no_integer_is_left_out() -> None:
    assert {re.sub(" by [a-z_]+", "", place) for place in INTEGERS} == places_of("int")


def test_what_one_argument_spoils_is_valid_otherwise() -> None:
    for name in Setting().calls:
        # Some calls unmap what others read.
        function, arguments = Setting().calls[name]
        assert attempt(partial(function, **arguments), evaluates=True, refused=()) == "", name


def test_threat_20_no_argument_ends_the_process_or_has_it_take_memory_without_end() -> None:
    done = run_program("import metal_ext, tests.metal_ext.arguments as it; it.main()")
    told = done.stdout.splitlines()
    wrong = [" ".join(told[i - 1 : i + 1]) for i, line in enumerate(told) if "WRONG" in line]
    assert not wrong
    assert done.returncode == 0, f"ended by {told[-1]}: {done.stderr}"


@pytest.mark.parametrize("seconds", [-0.001, 3600.001, 1e300, float("inf"), float("nan")])
def test_a_wait_is_between_nothing_and_an_hour(setting: Setting, seconds: float) -> None:
    with pytest.raises(IndexError, match="timeout_s must lie between 0 and 3600"):
        setting.mapper.wait(0, seconds)


@pytest.mark.parametrize(
    ("place", "end"),
    {
        "RowTable(segments.1)": MAPPED_TOKENS - 1,
        "RowTable(segments.2)": MAPPED_TOKENS,
        "decode_attention(first_row)": 1,
        "region_view(region)": 1,
        "region_view(tokens)": MAPPED_TOKENS,
        "block_copy(source_block)": MAPPED_BLOCKS - 1,
        "block_copy(target_block)": MAPPED_BLOCKS - 1,
        "block_copy(tokens)": SHAPE.tokens_per_block,
        "Mapper.wait(timeout_s)": 3600.0,
    }.items(),
)
def test_the_ends_of_intervals_are_accepted(setting: Setting, place: str, end: float) -> None:
    setting.call(place, end)


@pytest.mark.parametrize("count", [1, 128])
def test_a_head_has_one_to_128_frequencies(setting: Setting, count: int) -> None:
    angles = rope_angles(setting.rows, RopeTable([1.0] * count), setting.workers)
    assert angles.shape == (3, 2 * count)


@pytest.fixture(scope="module")
def large() -> AddressRange:
    """A range of 2**31 tokens of one byte."""
    blocks = 128
    shape = Shape(
        tokens_per_block=2**24, rows=(1,), blocks_per_heap=blocks, blocks_per_range=blocks
    )
    made = shape.mapped(blocks)
    assert made.mapped_tokens == 2**31
    return made


def test_a_table_has_no_more_rows_than_it_has_memory_for(large: AddressRange) -> None:
    most = 2**24
    with pytest.raises(IndexError, match="number of rows is 16777217; it must lie between 1 and"):
        RowTable([(large, 0, most + 1)])
    with pytest.raises(IndexError, match="number of rows is 16777217"):
        RowTable([(large, 0, 5), (large, 9, most - 4)])
    with pytest.raises(IndexError, match="tokens of a sequence is 2147483648; it must be"):
        RowTable([(large, 2**31 - 1, 1)])
    assert len(RowTable([(large, 2**31 - 2, 1)])) == 1


def test_a_view_is_no_longer_than_an_array_can_be(large: AddressRange) -> None:
    token = mx.zeros((1,))
    with pytest.raises(IndexError, match="tokens is 2147483648; it must lie between 1 and"):
        region_view(token, large, 0, 2**31, 1, 1, mx.uint8)
    assert region_view(token, large, 0, 2**31 - 1, 1, 1, mx.uint8).shape == (2**31 - 1, 1, 1)


def test_a_range_of_nothing_has_no_rows() -> None:
    empty = AddressRange.sparse(SHAPE.geometry())
    with pytest.raises(IndexError, match=r"\[0, 0 \+ 1\) does not lie inside \[0, 0\)"):
        RowTable([(empty, 0, 1)])
