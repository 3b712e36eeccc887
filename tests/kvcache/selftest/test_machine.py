import ctypes
import importlib.metadata
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.selftest import machine
from kvcache.selftest.machine import (
    FOOTPRINT_FIELD,
    RusageInfo,
    boot_id,
    footprint_with,
    installed_mlx,
    process_footprint,
    this_machine,
    wheel_tag,
    wheel_warning,
)


def test_this_machine_has_a_name_for_everything() -> None:
    its = this_machine()
    assert all(its.as_json().values())
    assert its.mlx == importlib.metadata.version("mlx")


def test_linux_names_its_kernel_and_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    assert this_machine().processor == "unknown"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n")
    assert this_machine().processor == "unknown"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 3000\n")
    assert this_machine().processor == "Abacus 3000"
    assert platform.release() in this_machine().system


def test_linux_names_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "boot_id")
    assert boot_id() == "unknown"
    (tmp_path / "boot_id").write_text("0b7e\n")
    assert boot_id() == "0b7e"


def test_a_mac_names_its_model_its_build_and_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "hw.model": "Mac15,6\n",
        "machdep.cpu.brand_string": "Apple M3 Pro\n",
        "kern.bootsessionuuid": "6E1C\n",
    }

    def sysctl(command: list[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(stdout=names.get(command[-1], ""))

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.4", ("", "", ""), "arm64"))
    monkeypatch.setattr(subprocess, "run", sysctl)
    its = this_machine()
    assert (its.model, its.processor) == ("Mac15,6", "Apple M3 Pro")
    assert its.system == "macOS 26.4 (unknown)"
    assert boot_id() == "6E1C"


def test_mlx_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert installed_mlx() == "not installed"


OLD, NEW = "py3-none-macosx_15_0_arm64", "py3-none-macosx_26_0_arm64"


@pytest.mark.parametrize(
    ("tag", "system", "processor", "words"),
    [
        (OLD, "26.4", "Apple M5 Pro", "no kernels for this chip's neural accelerators"),
        (OLD, "16.0", "Apple M5", "SYSTEM_VERSION_COMPAT=0 make setup"),
        (OLD, "27.0", "Apple M6", "the one for macOS 15"),
        (OLD, "26.4", "unknown", "the one for macOS 15"),
        (NEW, "26.1", "Apple M5", "made for 26.2 and later, and this is 26.1"),
        (NEW, "26", "Apple M5", "this is 26"),
        (NEW, "26.2", "Apple M5", ""),
        (NEW, "16.0", "Apple M5", ""),
        (OLD, "26.4", "Apple M4 Max", ""),
        (OLD, "15.6", "Apple M5", ""),
        ("", "26.4", "Apple M5", ""),
        (OLD, "", "Apple M5", ""),
    ],
)
def test_a_build_that_does_not_suit_system_and_chip_is_told_of(
    tag: str, system: str, processor: str, words: str
) -> None:
    said = wheel_warning(processor, tag, system)
    assert words in said
    assert bool(said) == bool(words)


def test_the_tag_is_that_of_the_wheel_which_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "mlx_metal-0.32.4.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: mlx-metal\nVersion: 0.32.4\n")
    (installed / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {OLD}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert wheel_tag() == OLD
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.4", ("", "", ""), "arm64"))
    assert "the one for macOS 15" in wheel_warning("Apple M5")
    (installed / "WHEEL").write_text("nothing\n")
    assert wheel_tag() == ""


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has it")
def test_without_the_wheel_there_is_nothing_to_tell() -> None:
    assert wheel_tag() == ""
    assert wheel_warning("Apple M5") == ""


MIB = 1024**2


# In a process of its own: threads that other tests have left free memory at any time.
MEMORY_FILE = """
import os
from kvcache.selftest.machine import process_footprint
content = bytes(8 << 20)
before = process_footprint()
file = os.memfd_create("test")
os.write(file, content)
within = process_footprint()
os.close(file)
print(within - before, process_footprint() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_memory_files_count_whether_they_are_mapped_or_not() -> None:
    command = [sys.executable, "-P", "-c", MEMORY_FILE]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    within, after = map(int, output.split())
    assert 8 * MIB <= within < 9 * MIB
    assert abs(after) < MIB


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
    monkeypatch.setattr(machine, "OWN_FILES", tmp_path)
    assert process_footprint() > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux writes")
def test_anonymous_and_swapped_memory_count_beside_what_files_are_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = tmp_path / "status"
    status.write_text("VmRSS:  900 kB\nRssAnon:\t  100 kB\nRssFile: 7 kB\nVmSwap:\t 20 kB\n")
    monkeypatch.setattr(machine, "STATUS", status)
    assert footprint_with(5 * MIB) == 120 * 1024 + 5 * MIB
    monkeypatch.undo()
    assert abs(footprint_with(0) - process_footprint()) < 64 * MIB


def test_a_mac_counts_memory_of_the_gpu_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(machine, "_mac_footprint", lambda: 77)
    assert footprint_with(5 * MIB) == 77
