"""Memory for slots: zeros at one address, that goes back to the system in whole pages."""

import ctypes
import sys

import numpy as np
import pytest

from metal_ext import SYSTEM_PAGE_BYTES, StateMemory
from tests.metal_ext.layers import Floats
from tests.metal_ext.programs import run_program

PAGE = SYSTEM_PAGE_BYTES


def numbers(memory: StateMemory) -> Floats:
    return np.ctypeslib.as_array(
        (ctypes.c_float * (memory.bytes // 4)).from_address(memory.address)
    )


def test_it_is_zeros_in_whole_pages_at_a_page() -> None:
    memory = StateMemory(3 * PAGE + 1)
    assert memory.bytes == 4 * PAGE
    assert memory.address % PAGE == 0
    assert not numbers(memory).any()


def test_what_is_released_is_zeros_and_the_rest_stays() -> None:
    memory = StateMemory(4 * PAGE)
    address, held = memory.address, numbers(memory)
    held[:] = 7.0
    memory.release(PAGE, 2 * PAGE)
    assert memory.address == address
    assert not held[PAGE // 4 : 3 * PAGE // 4].any()
    assert (held[: PAGE // 4] == 7.0).all()
    assert (held[3 * PAGE // 4 :] == 7.0).all()
    held[:] = 8.0
    assert (held == 8.0).all()


def test_only_whole_pages_of_it_are_released() -> None:
    memory = StateMemory(4 * PAGE)
    for offset, size in ((1, PAGE), (0, PAGE + 1), (PAGE // 2, PAGE)):
        with pytest.raises(ValueError, match=f"is not in whole pages of {PAGE} bytes"):
            memory.release(offset, size)
    with pytest.raises(IndexError, match="bytes of the memory"):
        memory.release(3 * PAGE, 2 * PAGE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mincore counts Linux's pages")
def test_what_is_in_memory_is_counted_in_whole_pages() -> None:
    memory = StateMemory(40_000 * PAGE)
    page = PAGE // 4
    assert memory.committed(0, memory.bytes) == 0
    held = numbers(memory)
    held[page * 2] = held[page * 3 + 5] = held[page * 39_999] = 1.0
    assert memory.committed(PAGE, 2 * PAGE) == PAGE
    assert memory.committed(3 * PAGE, PAGE) == PAGE
    assert memory.committed(0, memory.bytes) == 3 * PAGE
    memory.release(2 * PAGE, PAGE)
    assert memory.committed(0, memory.bytes) == 2 * PAGE
    with pytest.raises(ValueError, match="is not in whole pages"):
        memory.committed(1, PAGE)


def test_a_write_behind_its_end_ends_the_process() -> None:
    program = """
        import ctypes, metal_ext
        memory = metal_ext.StateMemory(1)
        ctypes.memset(memory.address + memory.bytes - 4, 1, 4)
        print("inside", flush=True)
        ctypes.memset(memory.address + memory.bytes, 1, 4)
    """
    done = run_program(program)
    assert done.stdout == "inside\n"
    assert done.returncode != 0


@pytest.mark.skipif("not __import__('sys').platform.startswith('linux')")
def test_memory_that_is_released_is_the_systems_again() -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * PAGE

    size = 64 << 20
    memory = StateMemory(size)
    before = resident()
    numbers(memory)[:] = 1.0
    full = resident()
    memory.release(0, size)
    assert full - before > size * 0.9
    assert full - resident() > size * 0.9
