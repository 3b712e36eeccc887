"""Fetches MLX's wheels for another system, in the version and with the hashes of quire's lock.

    python -m cross.mlx_wheels configs/locks/requirements.lock macosx_26_0_arm64 build/metal/mac26

The wheels are unpacked, not installed: headers and libraries to build against, with an import list
that the linker of that system wrote.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Of a Mac's MLX, and of a processor's.
MAC_PACKAGES = ("mlx", "mlx-metal")
LINUX_PACKAGES = ("mlx", "mlx-cpu")
PYTHON = "3.11"


def locked(lock: str, package: str) -> str:
    """The lock's entry of a package, with all its hashes and without its marker.

    The marker says for which system a lock's entry is; here that is not the system that asks.
    Raises ValueError where there is not exactly one entry.
    """
    entry = rf"^({re.escape(package)}==\S+)(?: ;[^\\\n]*)?((?: \\\n    --hash=\S+)+)$"
    found = re.findall(entry, lock, re.MULTILINE)
    if len(found) != 1:
        raise ValueError(f"the lock has {len(found)} entries of {package}, not one")
    return "".join(found[0])


def unpack(lock: Path, platform: str, target: Path, python: str = PYTHON) -> None:
    """Downloads the wheels for a platform and unpacks them below ``target``, which it replaces."""
    shutil.rmtree(target, ignore_errors=True)
    packages = MAC_PACKAGES if platform.startswith("macosx") else LINUX_PACKAGES
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        for package in packages:
            requirements.write(locked(lock.read_text(), package) + "\n")
        requirements.flush()
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
        command += ["--require-hashes", "--only-binary=:all:", "--platform", platform]
        command += ["--python-version", python, "--implementation", "cp", "--target", str(target)]
        subprocess.run([*command, "--requirement", requirements.name], check=True)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
