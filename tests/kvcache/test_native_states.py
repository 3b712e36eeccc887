"""What cells in memory of the system are charged for."""

import ctypes

import metal_ext
from kvcache.layout import KVShape, StateSpec
from kvcache.native_states import MEASURED_EVERY_S, NativeStates
from metal_ext import SYSTEM_PAGE_BYTES


def test_the_memory_of_cells_is_measured_from_time_to_time() -> None:
    cell = KVShape((), (StateSpec(1, 2, 32, 32, tail_rows=3),)).cell
    assert cell is not None
    now = 0.0
    states = NativeStates(cell, 4, metal_ext.CpuWorkers(1), clock=lambda: now)
    assert states.committed_bytes([]) == 0
    for number in (1, 3):
        ctypes.memset(states._address(number), 1, cell.cell_bytes)
    now = MEASURED_EVERY_S / 2
    assert states.committed_bytes([1, 3]) == 0, "asked a moment ago"
    now = MEASURED_EVERY_S
    assert states.committed_bytes([1, 3]) == 2 * cell.cell_bytes
    ctypes.memset(states._address(2), 1, 1)
    states.release([1])
    assert states.committed_bytes([2, 3]) == cell.cell_bytes + SYSTEM_PAGE_BYTES, "at once"
