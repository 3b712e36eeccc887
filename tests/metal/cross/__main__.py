"""Builds quire for macOS on this machine, checks what came out, and plants faults.

``make metal-cross`` runs it as ``python -m cross`` in tests/metal, with the tools' environment.
"""

import sys
import time

from . import binary_checks, planted, programs, wheel_checks
from .wheel_build import Target, build_wheel

TARGETS = (Target("mac26"), Target("mac14"))


def main() -> int:
    """The exit code."""
    wrong: list[str] = []
    caught = 0
    started = time.monotonic()
    for target in TARGETS:
        wheel = build_wheel(target)
        print(f"--- {wheel.name}, for macOS {target.macos} and newer, {wheel.stat().st_size} bytes")
        found = binary_checks.complaints(target, target.extension)
        found += wheel_checks.complaints(target, wheel)
        found += programs.complaints(target)
        print("\n".join(binary_checks.summary(target, target.extension)))
        for fault in planted.faults(target):
            missed = planted.verdict(target, fault)
            print(f"  {'MISSED' if missed else 'caught'} at {fault.stage}: {fault.name}")
            found += [missed] if missed else []
            caught += not missed
        wrong += [f"macOS {target.macos}: {sentence}" for sentence in found]
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    print(
        f"metal-cross: {len(TARGETS)} wheels, {caught} planted faults caught, "
        f"{len(wrong)} complaints, {time.monotonic() - started:.0f} s"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
