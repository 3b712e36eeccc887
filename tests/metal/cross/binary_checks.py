"""What must hold of the extension module before a Mac may load it."""

import re
from collections import Counter
from pathlib import Path

import lief

from .apple_sdk import exports, imports, mach_o
from .wheel_build import Target

RPATH = "@loader_path/../mlx/lib"
LIBMLX = "@rpath/libmlx.dylib"
ENTRY = "_PyInit__ext"
DOMAIN = "mlx"
# nanobind's name for compiler, C++ library, their ABI and its own: two extensions pass objects to
# each other where it and the domain are equal.
NANOBIND_TAG = re.compile(rb"nanobind_\w*_v\d+\0")


def complaints(target: Target, path: Path) -> list[str]:
    """Everything that is wrong with the module at ``path``, in sentences."""
    return [*_header(target, path), *_symbols(target, path), *_nanobind(target, path)]


def _header(target: Target, path: Path) -> list[str]:
    binary = mach_o(path)
    kinds = lief.MachO.Header
    found = []
    if binary.header.file_type != kinds.FILE_TYPE.BUNDLE:
        found.append(f"it is no bundle but {binary.header.file_type}")
    found += [
        f"the flag {flag} is not set"
        for flag in (kinds.FLAGS.TWOLEVEL, kinds.FLAGS.NOUNDEFS)
        if not binary.header.has(flag)
    ]
    version = binary.build_version
    minimum = ".".join(map(str, version.minos[:2]))
    if version.platform != lief.MachO.BuildVersion.PLATFORMS.MACOS or minimum != target.macos:
        found.append(f"it is for {version.platform} {minimum}, not for macOS {target.macos}")
    rpaths = [entry.path for entry in binary.rpaths]
    if rpaths != [RPATH]:
        found.append(f"its search paths are {rpaths}, not {RPATH}")
    if not binary.has_code_signature or binary.code_signature.data_size == 0:
        found.append("it has no code signature, and arm64 refuses it")
    good, reason = lief.MachO.check_layout(binary)
    if not good:
        found.append(f"its layout is wrong: {reason}")
    return found


def _symbols(target: Target, path: Path) -> list[str]:
    found = []
    for used in sorted(imports(path), key=lambda used: used.symbol):
        if used.library == LIBMLX:
            known = used.symbol in target.mlx_exports
        elif used.library:
            lists = (target.seen, target.listed)
            known = any(used.symbol in symbols.get(used.library, ()) for symbols in lists)
        else:
            known = used.symbol.startswith(("_Py", "__Py"))
        if not known:
            found.append(f"{used.symbol} is not known to be in {used.library or 'Python'}")
    if exports(path) != {ENTRY}:
        found.append(f"it exports {sorted(exports(path))}, not {ENTRY} alone")
    return found


def _nanobind(target: Target, path: Path) -> list[str]:
    ours, mlx = nanobind_tag(path), nanobind_tag(target.mlx_binding)
    if ours != mlx:
        return [f"arrays cannot pass: nanobind's tag is {ours}, and MLX's is {mlx}"]
    if f"\0{DOMAIN}\0".encode() not in path.read_bytes():
        return [f"arrays cannot pass: it does not name nanobind's domain {DOMAIN}"]
    return []


def nanobind_tag(path: Path) -> str:
    """The tag in an extension module, such as "nanobind_system_libcpp_abi1_a1_v22"."""
    tags = set(NANOBIND_TAG.findall(path.read_bytes()))
    if len(tags) != 1:
        raise ValueError(f"{path} has nanobind's tags {sorted(tags)}, not one")
    return str(tags.pop().rstrip(b"\0"), "ascii")


def summary(target: Target, path: Path) -> list[str]:
    """Figures about the module, as lines."""
    counts = Counter(used.library for used in imports(path))
    reasons = Counter(
        used.library for used in imports(path) if used.symbol in target.listed.get(used.library, ())
    )
    lines = [f"{path.name}: {path.stat().st_size} bytes, {nanobind_tag(path)}, signed"]
    for library, count in sorted(counts.items()):
        name = f"imports of {Path(library).name}" if library else "imports of Python, by name alone"
        listed_too = f" ({reasons[library]} listed with a reason)" if reasons[library] else ""
        lines.append(f"  {count:4} {name}{listed_too}")
    return lines
