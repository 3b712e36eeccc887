import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcache.canary import footprint
from kvcache.canary.footprint import FOOTPRINT_FIELD, RusageInfo, footprint_with, process_footprint

MIB = 1024**2


def test_memory_files_count_whether_they_are_mapped_or_not() -> None:
    if sys.platform != "linux":  # as a mark would, but that mypy understands it
        pytest.skip("memfd is Linux's")
    before = process_footprint()
    file = os.memfd_create("test")
    os.write(file, bytes(8 * MIB))
    assert 8 * MIB <= process_footprint() - before < 9 * MIB
    os.close(file)
    assert abs(process_footprint() - before) < MIB


def test_memory_that_is_touched_counts_until_it_is_given_back() -> None:
    # Not an array: it may lie in memory that an earlier one has left to the allocator.
    memory = mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before = process_footprint()
    for _ in range(32):
        memory.write(bytes(MIB))
    assert 31 * MIB < process_footprint() - before < 34 * MIB
    memory.close()
    assert abs(process_footprint() - before) < 2 * MIB


def test_a_mac_is_asked_for_its_physical_footprint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        @staticmethod
        def proc_pid_rusage(pid: int, flavor: int, info: Any) -> int:
            assert (pid, flavor) == (os.getpid(), 0)
            ctypes.cast(info, ctypes.POINTER(RusageInfo))[0].numbers[FOOTPRINT_FIELD] = 12345
            return 0

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert process_footprint() == 12345
    assert ctypes.sizeof(RusageInfo) == 96, "struct rusage_info_v0"
    monkeypatch.setattr(Library, "proc_pid_rusage", staticmethod(lambda *_: -1))
    with pytest.raises(OSError, match="proc_pid_rusage"):
        process_footprint()


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux writes")
def test_a_file_that_is_gone_is_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "3").symlink_to("/memfd:gone (deleted)")
    monkeypatch.setattr(footprint, "OWN_FILES", tmp_path)
    assert process_footprint() > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux writes")
def test_anonymous_and_swapped_memory_count_beside_what_files_are_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_text("VmRSS:  900 kB\nRssAnon:\t  100 kB\nRssFile: 7 kB\nVmSwap:\t 20 kB\n")
    monkeypatch.setattr(footprint, "STATUS", status)
    assert footprint_with(5 * MIB) == 120 * 1024 + 5 * MIB
    monkeypatch.undo()
    assert abs(footprint_with(0) - process_footprint()) < 64 * MIB


def test_a_mac_counts_memory_of_the_gpu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(footprint, "_mac_footprint", lambda: 77)
    assert footprint_with(5 * MIB) == 77
