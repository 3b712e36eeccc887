"""A stand-in for the part of Apple's SDK that a linker reads: which library exports which symbol.

Apple's own stub files may not be passed on. What can be known without them: a symbol that a binary
in MLX's wheels imports was there when Apple's linker made that binary for that macOS. Everything
else must be written down with a reason, in ``known_exports.toml``. A symbol that neither knows is
an undefined symbol for the linker.
"""

import dataclasses
import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import lief

FRAMEWORKS = "/System/Library/Frameworks/"
FOUNDATION = f"{FRAMEWORKS}Foundation.framework/Versions/C/Foundation"
LIBOBJC = "/usr/lib/libobjc.A.dylib"
# What the compiler driver and MLX's CMake package link, whether anything of it is used or not.
LINKED_ALWAYS = (
    "/usr/lib/libc++.1.dylib",
    "/usr/lib/libSystem.B.dylib",
    LIBOBJC,
    FOUNDATION,
    f"{FRAMEWORKS}Metal.framework/Versions/A/Metal",
    f"{FRAMEWORKS}QuartzCore.framework/Versions/A/QuartzCore",
    f"{FRAMEWORKS}Accelerate.framework/Versions/A/Accelerate",
)
# Whoever links Foundation gets the Objective-C runtime with it, in Apple's SDK as here.
REEXPORTS = {FOUNDATION: LIBOBJC}


@dataclasses.dataclass(frozen=True)
class Import:
    """One symbol that a Mach-O file expects of a library.

    library: the install name; "" where dyld searches all loaded images for it.
    """

    symbol: str
    library: str


def mach_o(path: Path) -> lief.MachO.Binary:
    """The only architecture of a Mach-O file. Raises ValueError where that is not arm64.

    Its parts live no longer than what is returned.
    """
    fat = lief.MachO.parse(str(path))
    binary = fat.take(lief.MachO.Header.CPU_TYPE.ARM64) if fat and len(fat) == 1 else None
    if binary is None:
        raise ValueError(f"{path} is no Mach-O file for arm64 alone")
    return binary


def imports(path: Path) -> set[Import]:
    """What the file binds at load time."""
    binary = mach_o(path)
    own_name = lief.MachO.LoadCommand.TYPE.ID_DYLIB
    libraries = [library.name for library in binary.libraries if library.command != own_name]
    return {
        Import(symbol.name, libraries[symbol.library_ordinal - 1])
        if 0 < symbol.library_ordinal <= len(libraries)
        else Import(symbol.name, "")
        for symbol in binary.imported_symbols
    }


def exports(path: Path) -> set[str]:
    """What the file offers to others."""
    binary = mach_o(path)
    return {symbol.name for symbol in binary.exported_symbols}


def deployment_target(path: Path) -> str:
    """The oldest macOS that the file says it runs on, such as "14.0"."""
    binary = mach_o(path)
    major, minor, _ = binary.build_version.minos
    return f"{major}.{minor}"


def sdk_version(path: Path) -> str:
    """The SDK that the file was linked against, such as "26.5"."""
    binary = mach_o(path)
    major, minor, _ = binary.build_version.sdk
    return f"{major}.{minor}"


def seen_at_apple(binaries: Iterable[Path]) -> dict[str, set[str]]:
    """Symbols by library that these Apple-linked files import from the system."""
    exports: dict[str, set[str]] = defaultdict(set)
    for path in binaries:
        for used in imports(path):
            if used.library.startswith(("/usr/lib/", "/System/")):
                exports[used.library].add(used.symbol)
    return exports


def known_exports(path: Path) -> dict[str, set[str]]:
    """The list with reasons, as symbols by library."""
    exports: dict[str, set[str]] = defaultdict(set)
    for entry in tomllib.loads(path.read_text())["export"]:
        assert entry["why"], f"{path}: {entry['symbols']} without a reason"
        exports[entry["library"]].update(entry["symbols"])
    return exports


def write_sdk(sysroot: Path, exports: dict[str, set[str]], version: str) -> None:
    """Writes stubs for arm64 below ``sysroot``. version: of the SDK, noted in what is linked."""
    for library in {*exports, *LINKED_ALWAYS}:
        text = _stub(library, sorted(exports.get(library, ())))
        for path in _stub_paths(sysroot, library):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    settings = {"Version": version, "MaximumDeploymentTarget": f"{version}.99"}
    (sysroot / "SDKSettings.json").write_text(json.dumps(settings))


def _stub_paths(sysroot: Path, library: str) -> tuple[Path, Path]:
    """Where linkers look for a library: by install name, and by ``-l`` or ``-framework``."""
    installed = (sysroot / library.lstrip("/")).with_suffix(".tbd")
    if library.startswith(FRAMEWORKS):
        return installed, sysroot / library.split("/Versions/")[0].lstrip("/") / installed.name
    return installed, installed.with_name(installed.name.split(".")[0] + ".tbd")


def _stub(library: str, symbols: list[str]) -> str:
    lines = ["--- !tapi-tbd", "tbd-version: 4", "targets: [ arm64-macos ]"]
    lines.append(f"install-name: '{library}'")
    if library in REEXPORTS:
        lines.append("reexported-libraries:")
        lines.append(f"  - {{ targets: [ arm64-macos ], libraries: [ '{REEXPORTS[library]}' ] }}")
    if symbols:
        names = ", ".join(f"'{symbol}'" for symbol in symbols)
        lines.append("exports:")
        lines.append(f"  - {{ targets: [ arm64-macos ], symbols: [ {names} ] }}")
    return "\n".join([*lines, "...", ""])
