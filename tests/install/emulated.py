"""Loads the wheel for arm64 under an emulator: Debian's Python for arm64, and all that quire needs.

    python -m tests.install.emulated

needs root, and the wheel for Python 3.11 in build/wheels. That MLX's arrays pass into the extension
is checked when it is imported. Programs that quire starts would need the emulator too: it is not
served from. What the kernels compute on arm64 is asked by ``make -C tests/native arm64``.
"""

import subprocess
import sys

from tests.docker.steps import Image, inside
from tests.install.roots import APT, BUILT, run_in
from tests.install.wheels import MACHINES, WHEELS

PYTHON = "3.11"
MACHINE = "aarch64"
PACKAGES = (
    "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libstdc++6",
    "libgcc-s1", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5", "libcrypt1",
    "libuuid1",
)  # fmt: skip
UNPACK = (
    "dpkg --add-architecture arm64 && {apt} --no-install-recommends qemu-user && "
    "rm -rf /tmp/debs /arm64 && mkdir /tmp/debs /arm64 && cd /tmp/debs && "
    "apt-get download -q {packages} && for deb in *.deb; do dpkg-deb -x $deb /arm64; done && "
    "dpkg --remove-architecture arm64"
)
# Of the C library's versions that wheels are named after, those that quire's wheel runs with.
GLIBC = range(17, 36)
LOAD = """import platform, metal_ext
found = platform.machine(), list(metal_ext.instruction_sets())
assert found == ('aarch64', ['dotprod', 'neon']), found"""
EMULATED = 'PYTHONPATH=/site qemu-aarch64 -L /arm64 /arm64/usr/bin/python{python} -c "{program}"'


def main() -> int:
    assert MACHINE in MACHINES
    (wheel,) = WHEELS.glob(f"*-cp311-cp311-*_{MACHINE}.whl")
    image = Image(BUILT / "root-builder")
    packages = " ".join(f"{package}:arm64" for package in PACKAGES)
    run_in(image, UNPACK.format(apt=APT, packages=packages))
    platforms = [f"--platform=manylinux_2_{minor}_{MACHINE}" for minor in GLIBC]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--upgrade"]
    pip += [f"--target={inside(image, '/site')}", "--only-binary=:all:", *platforms]
    subprocess.run(
        [*pip, f"--python-version={PYTHON}", "--implementation=cp", str(wheel)], check=True
    )
    run_in(image, EMULATED.format(python=PYTHON, program=LOAD))
    print(f"1 passed, 0 failed  # {wheel.name} loads under an emulator")
    return 0


if __name__ == "__main__":
    sys.exit(main())
