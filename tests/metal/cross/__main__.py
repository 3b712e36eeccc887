"""Builds quire for macOS on this machine, checks what came out, and plants faults.

``make -C tests/metal cross`` runs it as ``python -m cross`` in tests/metal, with the tools'
environment. Its arguments are the Pythons to build for; without any, this one. The wheels are in
build/wheels.
Faults are planted for the first Python of each macOS: the checks are the same for all.
"""

import shutil
import sys
import time

from . import binary_checks, planted, programs, wheel_checks
from .wheel_build import OWN_PYTHON, ROOT, Target, build_wheel

MACS = ("mac26", "mac14")
WHEELS = ROOT / "build/wheels"


def main() -> int:
    """The exit code."""
    wrong: list[str] = []
    caught = 0
    started = time.monotonic()
    pythons = sys.argv[1:] or [OWN_PYTHON]
    targets = [Target(mac, python) for mac in MACS for python in pythons]
    WHEELS.mkdir(parents=True, exist_ok=True)
    for target in targets:
        wheel = build_wheel(target)
        print(f"--- {wheel.name}, for macOS {target.macos} and newer, {wheel.stat().st_size} bytes")
        found = binary_checks.complaints(target, target.extension)
        found += wheel_checks.complaints(wheel, target.expected)
        if target.python == pythons[0]:
            found += programs.complaints(target)
        shutil.copy2(wheel, WHEELS)
        print("\n".join(binary_checks.summary(target, target.extension)))
        for fault in planted.faults(target) if target.python == pythons[0] else ():
            missed = planted.verdict(target, fault)
            print(f"  {'MISSED' if missed else 'caught'} at {fault.stage}: {fault.name}")
            found += [missed] if missed else []
            caught += not missed
        about = f"macOS {target.macos}, Python {target.python}"
        wrong += [f"{about}: {sentence}" for sentence in found]
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    print(
        f"metal-cross: {len(targets)} wheels, {caught} planted faults caught, "
        f"{len(wrong)} complaints, {time.monotonic() - started:.0f} s"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
