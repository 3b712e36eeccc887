import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.canary import footprint
from kvcache.canary.footprint import FOOTPRINT_FIELD, RusageInfo, process_footprint

MIB = 1024**2


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_memory_files_count_whether_they_are_mapped_or_not() -> None:
    before = process_footprint()
    file = os.memfd_create("test")
    os.write(file, bytes(8 * MIB))
    assert 8 * MIB <= process_footprint() - before < 9 * MIB
    os.close(file)
    assert abs(process_footprint() - before) < MIB


def test_memory_that_is_touched_counts_until_it_is_given_back() -> None:
    before = process_footprint()
    array = np.ones(32 * MIB, np.uint8)
    assert 31 * MIB < process_footprint() - before < 34 * MIB
    del array
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
