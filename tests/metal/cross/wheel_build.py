"""Builds quire's wheel for one macOS, by the project's own build with another compiler."""

import contextlib
import dataclasses
import functools
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import scikit_build_core.build
import ziglang

from .apple_sdk import (
    deployment_target,
    exports,
    known_exports,
    sdk_version,
    seen_at_apple,
    write_sdk,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build/metal"


@dataclasses.dataclass(frozen=True)
class Target:
    """One macOS to build for: the oldest one that MLX's wheel of that name runs on.

    name: of the folder below build/metal with MLX's unpacked wheels, such as "mac26".
    """

    name: str

    @property
    def mlx(self) -> Path:
        """MLX's package: headers, libraries, and the binding that arrays come from."""
        return BUILD / self.name / "mlx"

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
        return self.build_dir / f"_ext{extension_suffix()}"

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


def extension_suffix() -> str:
    """Of extension modules of this Python's version on a Mac."""
    return f".cpython-{sysconfig.get_config_var('py_version_nodot')}-darwin.so"


def zig() -> str:
    """Path of the compiler."""
    return str(Path(ziglang.__file__).with_name("zig"))


def driver(target: Target) -> list[str]:
    """The C++ compiler and linker, as a command."""
    command = [str(HERE / "driver"), "c++", zig(), target.macos]
    return [*command, "-arch", "arm64", "-isysroot", str(target.sdk)]


def build_wheel(target: Target) -> Path:
    """Builds the wheel into the target's build folder and returns its path."""
    shutil.rmtree(target.sdk, ignore_errors=True)
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
        "cmake.define.QUIRE_CROSS_ZIG": zig(),
        "install.strip": "false",  # would break the signature; the linker has left the names out
        "logging.level": "WARNING",
    }
    wheels = target.build_dir / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    environment = {
        "PYTHONPATH": str(target.mlx.parent),
        "SETUPTOOLS_EXT_SUFFIX": extension_suffix(),
        "_PYTHON_HOST_PLATFORM": f"macosx-{target.macos.split('.')[0]}.0-arm64",
    }
    with _surroundings(environment, ROOT):
        return wheels / scikit_build_core.build.build_wheel(str(wheels), settings)


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
