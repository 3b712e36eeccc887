"""How much memory the system charges this process for, by the system's own account."""

import ctypes
import os
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
ROLLUP = Path("/proc/self/smaps_rollup")
OWN_FILES = Path("/proc/self/fd")
BLOCK_BYTES = 512  # of st_blocks
# proc_pid_rusage's first form (sys/resource.h, struct rusage_info_v0): a UUID, then ten 64-bit
# numbers, of which the eighth is what macOS charges.
RUSAGE_INFO_V0 = 0
FOOTPRINT_FIELD = 7


class RusageInfo(ctypes.Structure):
    """struct rusage_info_v0."""

    _fields_ = (("uuid", ctypes.c_uint8 * 16), ("numbers", ctypes.c_uint64 * 10))


def process_footprint() -> int:
    """Bytes. A Mac's physical footprint, memory of the GPU included; on Linux anonymous memory and
    the blocks of memory files, mapped or not. Raises OSError."""
    return _mac_footprint() if sys.platform == "darwin" else _linux_footprint()


def footprint_with(heap_bytes: int) -> int:
    """The same, but on Linux without a walk through all pages, which mappings would wait for: what
    it says may be a few pages old. heap_bytes: what memory files are charged. Raises OSError."""
    if sys.platform == "darwin":
        return _mac_footprint()
    wanted = ("RssAnon:", "VmSwap:")
    lines = [line.split() for line in STATUS.read_text().splitlines() if line.startswith(wanted)]
    return sum(int(line[1]) for line in lines) * 1024 + heap_bytes


def _mac_footprint() -> int:
    info = RusageInfo()
    system = ctypes.CDLL(None, use_errno=True)
    if system.proc_pid_rusage(os.getpid(), RUSAGE_INFO_V0, ctypes.byref(info)):
        raise OSError(ctypes.get_errno(), "proc_pid_rusage")
    return int(info.numbers[FOOTPRINT_FIELD])


def _linux_footprint() -> int:
    lines = ROLLUP.read_text().splitlines()
    (anonymous,) = [line.split()[1] for line in lines if line.startswith("Anonymous:")]
    files = 0
    for entry in OWN_FILES.iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:"):
                files += entry.stat().st_blocks * BLOCK_BYTES
        except OSError:
            continue  # the file of this very listing is closed by now
    return int(anonymous) * 1024 + files
