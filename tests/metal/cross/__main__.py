"""Builds quire for macOS on this machine, and checks what came out.

``make -C tests/metal cross`` runs it as ``python -m cross`` in tests/metal, with the tools'
environment. Its arguments are the Pythons to build for; without any, this one. The wheels are in
build/wheels.
"""

import shutil
import sys
import time

from . import binary_checks, wheel_checks
from .wheel_build import OWN_PYTHON, ROOT, Target, build_wheel

MACS = ("mac26", "mac14")
WHEELS = ROOT / "build/wheels"


def main() -> int:
    """The exit code."""
    wrong: list[str] = []
    started = time.monotonic()
    pythons = sys.argv[1:] or [OWN_PYTHON]
    targets = [Target(mac, python) for mac in MACS for python in pythons]
    WHEELS.mkdir(parents=True, exist_ok=True)
    for target in targets:
        wheel = build_wheel(target)
        print(f"--- {wheel.name}, for macOS {target.macos} and newer, {wheel.stat().st_size} bytes")
        found = binary_checks.complaints(target, target.extension)
        found += wheel_checks.complaints(wheel, target.expected)
        shutil.copy2(wheel, WHEELS)
        print("\n".join(binary_checks.summary(target, target.extension)))
        about = f"macOS {target.macos}, Python {target.python}"
        wrong += [f"{about}: {sentence}" for sentence in found]
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    print(
        f"metal-cross: {len(targets)} wheels, {len(wrong)} complaints, "
        f"{time.monotonic() - started:.0f} s"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
