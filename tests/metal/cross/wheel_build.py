"""Builds quire's wheel for one macOS and Python, by the project's own build with another compiler.

Another Python than the one that runs the build is named by its headers, the suffix of its modules
and, afterwards, the wheel's tags.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import scikit_build_core.build
import ziglang

from . import mlx_wheels
from .apple_sdk import (
    deployment_target,
    exports,
    known_exports,
    sdk_version,
    seen_at_apple,
    write_sdk,
)
from .wheel_checks import Expected

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build/metal"
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# tests/install fetches them, as make -C tests/install wheels does.
HEADERS = ROOT / "build/install/headers"


@dataclasses.dataclass(frozen=True)
class Target:
    """One macOS and one Python to build for: the oldest macOS that MLX's wheel of that name is for.

    name: of the folder below build/metal with MLX's unpacked wheels, such as "mac26".
    """

    name: str
    python: str = OWN_PYTHON

    @functools.cached_property
    def mlx(self) -> Path:
        """MLX's package: headers, libraries, and the binding that arrays come from."""
        if self.python == mlx_wheels.PYTHON:
            return BUILD / self.name / "mlx"
        folder = BUILD / f"{self.name}-{self.python}"
        lock = ROOT / "configs/locks/requirements.lock"
        known, of = folder / ".of", mlx_wheels.locked(lock.read_text(), "mlx")
        if not known.is_file() or known.read_text() != of:
            platform = f"macosx_{self.name.removeprefix('mac')}_0_arm64"
            mlx_wheels.unpack(lock, platform, folder, self.python)
            known.write_text(of)
        return folder / "mlx"

    @property
    def mlx_binding(self) -> Path:
        """The one extension module of MLX."""
        (path,) = self.mlx.glob("core.*-darwin.so")
        return path

    @functools.cached_property
    def macos(self) -> str:
        """Deployment target, such as "14.0"."""
        return deployment_target(self.mlx / "lib/libmlx.dylib")

    @property
    def platform_tag(self) -> str:
        """Of the wheel. From macOS 11 on, it names the major version alone."""
        return f"macosx_{self.macos.split('.')[0]}_0_arm64"

    @property
    def build_dir(self) -> Path:
        """Where CMake builds."""
        return BUILD / f"cross-{self.name}"

    @property
    def sdk(self) -> Path:
        """The stand-in for Apple's SDK."""
        return BUILD / f"sdk-{self.name}"

    @property
    def extension(self) -> Path:
        """The extension module in the build folder."""
        return self.build_dir / f"_ext{self.suffix}"

    @property
    def suffix(self) -> str:
        """Of extension modules of that Python on a Mac."""
        return f".cpython-{self.python.replace('.', '')}-darwin.so"

    @property
    def expected(self) -> Expected:
        """What its wheel says of itself."""
        return Expected(self.python, self.platform_tag, self.suffix)

    @functools.cached_property
    def seen(self) -> dict[str, set[str]]:
        """What the wheels' binaries import from the system, by library."""
        return seen_at_apple([*(self.mlx / "lib").glob("*.dylib"), self.mlx_binding])

    @functools.cached_property
    def listed(self) -> dict[str, set[str]]:
        """What else may be imported from the system, by library."""
        return known_exports(HERE / "known_exports.toml")

    @functools.cached_property
    def mlx_exports(self) -> set[str]:
        """What libmlx offers."""
        return exports(self.mlx / "lib/libmlx.dylib")


def build_wheel(target: Target) -> Path:
    """Builds the wheel into the target's build folder and returns its path.

    The wheels and modules of other Pythons are removed: what lies there is of one build.
    """
    shutil.rmtree(target.sdk, ignore_errors=True)
    for module in target.build_dir.glob("_ext.*.so"):
        module.unlink()
    known = {
        library: target.seen.get(library, set()) | target.listed.get(library, set())
        for library in {*target.seen, *target.listed}
    }
    write_sdk(target.sdk, known, sdk_version(target.mlx / "lib/libmlx.dylib"))
    settings: dict[str, str | list[str]] = {
        "build-dir": str(target.build_dir),
        "cmake.args": [f"--toolchain={HERE / 'toolchain.cmake'}"],
        "cmake.define.QUIRE_CROSS_MACOS": target.macos,
        "cmake.define.QUIRE_CROSS_SDK": str(target.sdk),
        "cmake.define.QUIRE_CROSS_ZIG": str(Path(ziglang.__file__).with_name("zig")),
        "install.strip": "false",  # would break the signature; the linker has left the names out
        "logging.level": "WARNING",
    }
    settings["cmake.define.QUIRE_PYTHON_HEADERS"] = _headers(target.python)
    wheels = target.build_dir / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    environment = {
        "PYTHONPATH": str(target.mlx.parent),
        "SETUPTOOLS_EXT_SUFFIX": target.suffix,
        "_PYTHON_HOST_PLATFORM": f"macosx-{target.macos.split('.')[0]}.0-arm64",
    }
    with _surroundings(environment, ROOT):
        built = wheels / scikit_build_core.build.build_wheel(str(wheels), settings)
    return built if target.python == OWN_PYTHON else _retagged(built, target.python)


def _headers(python: str) -> str:
    """Where those of another Python are; "" for this one's own, which the build finds."""
    if python == OWN_PYTHON:
        return ""
    folder = HEADERS / python
    assert (folder / "complete").is_file(), (
        f"{folder} is missing: make -C tests/install headers PYTHONS={python}"
    )
    return str(folder)


def _retagged(wheel: Path, python: str) -> Path:
    """The wheel under the tags of another Python."""
    version = "cp" + python.replace(".", "")
    command = [sys.executable, "-m", "wheel", "tags", "--remove", str(wheel)]
    command += [f"--python-tag={version}", f"--abi-tag={version}"]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    return wheel.with_name(said.stdout.split()[-1])


@contextlib.contextmanager
def _surroundings(environment: dict[str, str], folder: Path) -> Iterator[None]:
    """What a build backend reads from its process: environment and working directory."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
