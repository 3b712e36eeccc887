"""Facts on which self-test results depend: machine, system, MLX version, and the process's memory.
Imports neither MLX nor the extension, which may fail to load."""

import ctypes
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SYSCTL = "/usr/sbin/sysctl"

STATUS = Path("/proc/self/status")
ROLLUP = Path("/proc/self/smaps_rollup")
OWN_FILES = Path("/proc/self/fd")
BLOCK_BYTES = 512  # the unit of os.stat's st_blocks
# rusage_info_v0 of sys/resource.h is a UUID and 64-bit numbers. The eighth is the footprint.
RUSAGE_INFO_V0 = 0
FOOTPRINT_FIELD = 7

# Neural accelerators came with the M5. MLX's wheels for macOS 26 and later have kernels for them.
ACCELERATED = 26
FIRST_WITH_ACCELERATORS = 5
# The version that macOS 26 reports to programs built for an older system.
OLD_NAME_OF_26 = 16
# The first macOS version on which MLX runs its kernels for neural accelerators.
NEEDED_SYSTEM = (26, 2)


@dataclass(frozen=True, slots=True)
class Machine:
    """Names of the machine's model, system and MLX version, for reports and for names of files."""

    model: str
    processor: str
    system: str
    """The system's name and version. On a Mac, the build is included."""
    mlx: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def this_machine() -> Machine:
    mlx = installed_mlx()
    if sys.platform != "darwin":
        system = f"{platform.system()} {platform.release()}"
        return Machine(platform.machine(), _linux_processor(), system, mlx)
    model, processor, build = (
        _sysctl(name) for name in ("hw.model", "machdep.cpu.brand_string", "kern.osversion")
    )
    return Machine(model, processor, f"macOS {platform.mac_ver()[0]} ({build})", mlx)


def boot_id() -> str:
    """Return an id that changes when the machine starts, or "unknown"."""
    if sys.platform == "darwin":
        return _sysctl("kern.bootsessionuuid")
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


def installed_mlx() -> str:
    try:
        return importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _sysctl(name: str) -> str:
    command = [SYSCTL, "-n", name]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return output.strip() or "unknown"


def _linux_processor() -> str:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


# --- the build of MLX's Metal side ----------------------------------------------------------------


def wheel_tag() -> str:
    """Return mlx-metal's wheel tag, like "py3-none-macosx_15_0_arm64", or "" if not installed."""
    try:
        text = importlib.metadata.distribution("mlx-metal").read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        return ""
    tag = re.search(r"^Tag: *(\S+)", text or "", re.MULTILINE)
    return tag[1] if tag else ""


def wheel_warning(processor: str, tag: str | None = None, system: str | None = None) -> str:
    """Return the reason that the installed MLX wheel does not suit this machine, or "". pip chooses
    a wheel for the system that Python was built for, which may be older than the running system.
    ``processor`` is the name that the system reports. ``tag`` and ``system`` are None for the
    installed wheel and the running system."""
    tag = wheel_tag() if tag is None else tag
    system = platform.mac_ver()[0] if system is None else system
    of_wheel, here = re.search(r"macosx_(\d+)_", tag), re.match(r"(\d+)(?:\.(\d+))?", system)
    chip = re.search(r"\bM(\d+)\b", processor)
    if of_wheel is None or here is None or (chip and int(chip[1]) < FIRST_WITH_ACCELERATORS):
        return ""
    major, minor = int(here[1]), int(here[2] or 0)
    major = ACCELERATED if major == OLD_NAME_OF_26 else major
    built_for = int(of_wheel[1])
    if built_for < ACCELERATED <= major:
        return (
            f"MLX's Metal library is the one for macOS {built_for} ({tag}), which has no kernels "
            f"for this chip's neural accelerators: prompts take about three times as long. "
            "Reinstall with `SYSTEM_VERSION_COMPAT=0 make setup`, or with a newer Python"
        )
    if built_for >= ACCELERATED and (major, minor) < NEEDED_SYSTEM and int(here[1]) == major:
        return (
            f"MLX's Metal library is the one for macOS 26 ({tag}), made for 26.2 and later, and "
            f"this is {system}: update the system, or its kernels for this chip may fail"
        )
    return ""


# --- the memory that the system charges to this process -------------------------------------------


class RusageInfo(ctypes.Structure):
    """The C structure rusage_info_v0, which proc_pid_rusage fills."""

    _fields_ = (("uuid", ctypes.c_uint8 * 16), ("numbers", ctypes.c_uint64 * 10))


def process_footprint() -> int:
    """Return the bytes that the system charges to this process: on a Mac its physical footprint,
    including memory of the GPU; on Linux anonymous memory and all memfd blocks. Raises OSError."""
    if sys.platform == "darwin":
        return _mac_footprint()
    lines = ROLLUP.read_text().splitlines()
    (anonymous,) = [line.split()[1] for line in lines if line.startswith("Anonymous:")]
    files = 0
    for entry in OWN_FILES.iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:"):
                files += entry.stat().st_blocks * BLOCK_BYTES
        except OSError:
            continue  # the descriptor that listed the folder is closed
    return int(anonymous) * 1024 + files


def footprint_with(heap_bytes: int) -> int:
    """Estimate the result of process_footprint without a walk through all pages, which delays
    mappings on Linux. There, ``heap_bytes`` stands for the size of memfd files. Raises OSError."""
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
