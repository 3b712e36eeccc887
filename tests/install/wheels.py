"""Builds the wheels for Linux, for every Python, and checks each.

    python -m tests.install.wheels [--pythons 3.11 ...] [--machines x86_64 ...]

They are built in a root of Debian's, by the compiler that everything is tested with, whatever this
machine is, and lie in build/wheels. Needs root, debootstrap and unshare. Whether they run is asked
by ``python -m tests.install``, in the roots of roots.py.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

from tests.docker.steps import Image, in_namespaces, inside, made, run
from tests.install.roots import (
    APT,
    BUILT,
    HEADERS_OF,
    PYTHONS,
    RELEASES,
    ROOT,
    fresh_root,
    headers,
    run_in,
    tracked,
)
from tests.metal.cross import mlx_wheels, wheel_checks

WHEELS = ROOT / "build" / "wheels"
MACHINES = ("x86_64", "aarch64")
PLATFORM = "manylinux_2_35"
# Its compiler is the tests' one, and its Python the oldest that quire runs on.
BUILDS_IN = RELEASES["bookworm"]
COMPILERS = "g++ g++-aarch64-linux-gnu python3-dev python3-venv"
TOOLS_LOCK = "configs/locks/install.lock"
MLX_LOCK = "configs/locks/requirements.lock"
SOURCES = (
    "metal_ext", "kvcache", "engine", "server", "configs", "pyproject.toml", "README.md", "LICENSE",
    "tests/__init__.py", "tests/install",
)  # fmt: skip
TOOLS = (
    "python3 -m venv --clear /opt/tools && /opt/tools/bin/pip install --quiet "
    f"--disable-pip-version-check --require-hashes --requirement /src/{TOOLS_LOCK}"
)
RUN = "cd /src && PATH=/opt/tools/bin:$PATH python -m {command}"


def builder() -> Image:
    """Return the root with compiler and tools, and the checkout as it is now."""
    image = Image(BUILT / "root-builder")
    locks = [(ROOT / lock).read_text() for lock in (TOOLS_LOCK, MLX_LOCK)]
    of = "\n".join([COMPILERS, *locks])
    known = inside(image, "/opt/made-of")
    if not known.is_file() or known.read_text() != of:
        image = fresh_root(BUILDS_IN, "builder")
        run_in(image, f"{APT} --no-install-recommends {COMPILERS}")
        lay_sources(image)
        run_in(image, TOOLS)
        known.write_text(of)
    else:
        lay_sources(image)
    shutil.rmtree(inside(image, "/wheels"), ignore_errors=True)
    made(inside(image, "/wheels"))
    return image


def lay_sources(image: Image) -> None:
    """Copy the sources of a wheel to /src; unchanged ones keep their time."""
    shutil.rmtree(inside(image, "/src"), ignore_errors=True)
    for name in tracked(*SOURCES):
        target = inside(image, f"/src/{name}")
        shutil.copy2(ROOT / name, made(target.parent) / target.name)


def build(image: Image, python: str, machine: str) -> Path:
    """Build and check one wheel. Raises AssertionError or CalledProcessError."""
    begun = time.monotonic()
    target = f"{python}-{machine}"
    lay_headers(image, python)
    mlx = inside(image, f"/mlx/{target}")
    if not mlx.is_dir():
        mlx_wheels.unpack(ROOT / MLX_LOCK, f"{PLATFORM}_{machine}", mlx, python)
    folders = f"/headers/{python} /mlx/{target} /wheels"
    run_tool(image, f"tests.install.linux_build {python} {machine} {folders}")
    version = "cp" + python.replace(".", "")
    (built,) = inside(image, "/wheels").glob(f"*-{version}-*_{machine}.whl")
    wheel = Path(shutil.copy2(built, WHEELS / built.name))
    expected = wheel_checks.Expected(python, f"{PLATFORM}_{machine}", suffix(python, machine))
    assert not (wrong := wheel_checks.complaints(wheel, expected)), "\n".join(wrong)
    size, seconds = wheel.stat().st_size / 2**20, time.monotonic() - begun
    print(f"{seconds:6.1f} s  {wheel.name}, {size:.1f} MiB", flush=True)
    return wheel


def run_tool(image: Image, command: str) -> None:
    """Run a module in the root without a network: all that it uses is there."""
    shell = ["unshare", "--net", "/bin/sh", "-c", RUN.format(command=command)]
    run(in_namespaces(image, shell), image.environment)


def suffix(python: str, machine: str) -> str:
    return f".cpython-{python.replace('.', '')}-{machine}-linux-gnu.so"


def lay_headers(image: Image, python: str) -> None:
    there = inside(image, f"/headers/{python}")
    if not there.is_dir():
        shutil.copytree(headers(python), there)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pythons", nargs="+", choices=PYTHONS, default=list(HEADERS_OF))
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    asked = parser.parse_args()
    made(WHEELS)
    image = builder()
    wheels = [
        build(image, python, machine) for machine in asked.machines for python in asked.pythons
    ]
    print(f"{len(wheels)} passed, 0 failed  # wheels for Linux, in {WHEELS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
