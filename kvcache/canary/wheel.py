"""Which build of MLX's Metal side is installed: pip takes the one for the system that Python was
built for, which may be older than the system that is here."""

import importlib.metadata
import platform
import re

# From which on its wheels have kernels for the neural accelerators of an M5 and its successors.
ACCELERATED = 26
FIRST_WITH_ACCELERATORS = 5
# What macOS 26 calls itself to programs that were built for an older one.
OLD_NAME_OF_26 = 16
# From this system on, those kernels run (the library's own minimum).
NEEDED_SYSTEM = (26, 2)


def wheel_tag() -> str:
    """That of mlx-metal, such as "py3-none-macosx_15_0_arm64"; "" where it is not installed."""
    try:
        said = importlib.metadata.distribution("mlx-metal").read_text("WHEEL")
    except importlib.metadata.PackageNotFoundError:
        return ""
    found = re.search(r"^Tag: *(\S+)", said or "", re.MULTILINE)
    return found[1] if found else ""


def wheel_warning(processor: str, tag: str | None = None, system: str | None = None) -> str:
    """What is wrong with it for this machine; "" where nothing is. processor: as the system names
    it. tag, system: None for what is here."""
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
