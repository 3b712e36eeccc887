"""What brings kernels to Mesa's compiler, as far as it needs no compiler."""

import pytest

from tests.metal.occupancy.__main__ import cells, shown
from tests.metal.occupancy.kernels import STATISTICS, Occupancy, entry_point, place_of

TEXT = """\
template <typename T>
[[kernel, max_total_threads_per_threadgroup(64)]] void add(
    const device T* from [[buffer(0)]],
    constant uint& count [[buffer(3)]],
    uint2 at [[thread_position_in_grid]]) {
  threadgroup float sums[4 * 2];
  threadgroup uint flags[2];
}
template [[host_name("add_float")]] [[kernel]] decltype(add<float>) add<float>;
template [[host_name("add_half")]] [[kernel]] decltype(add<half>) add<half>;
"""
SAID = (
    "SHADER-DB:  - MESA_SHADER_COMPUTE shader: 1610 inst, 1420 alu, 1420 fscib, 608 ic, "
    "11412 bytes, 173 regs, 116 uniforms, 64 scratch, 576 threads, 4 loops, 3:5 spills:fills"
)


def test_an_entry_point_takes_addresses_for_buffers_and_has_one_array_per_threadgroup_array() -> (
    None
):
    text = entry_point(TEXT, "add_half")
    assert "[[" not in text
    assert "reqd_work_group_size(64, 1, 1)" in text
    assert "(ulong buffer0, ulong buffer1)" in text
    assert "Parameters<decltype(add<half>)>::At<1>" in text
    assert "uint2(uint(get_global_id(0)), uint(get_global_id(1)))" in text
    assert "msl_threadgroup_array<float[4 * 2], 16>" in text
    assert "msl_threadgroup_array<uint[2], 32784>" in text
    assert "add<float>" not in text


def test_a_parameter_that_nobody_knows_is_an_error() -> None:
    assert place_of("uint lane [[thread_index_in_simdgroup]]") == "uint(get_sub_group_local_id())"
    with pytest.raises(ValueError, match="amplification_id"):
        place_of("uint which [[amplification_id]]")


def test_what_the_compiler_says_is_read() -> None:
    assert STATISTICS.findall(SAID) == [
        ("1610", "1420", "173", "116", "64", "576", "4", "3", "5"),
    ]
    line = cells(Occupancy(1610, 1420, 173, 576, 256, 64, 3))
    assert line == ["256", "173", "576", "2", "1610", "3 spills, 64 bytes"]


def test_the_table_has_one_type_of_numbers() -> None:
    names = ("zero_blocks", "decode_split_bfloat_bfloat_64_dense", "append_bfloat_half_paged")
    assert [shown(name) for name in names] == [True, True, False]
