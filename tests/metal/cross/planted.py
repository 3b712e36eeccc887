"""Faults planted on purpose, each of which the build or the checks must name.

A gate that has never refused anything proves nothing. Every fault is put into the module that was
just built, by the compile and link commands that built it.
"""

import dataclasses
import tempfile
from pathlib import Path

from . import binary_checks
from .commands import compiling, linking, refusal
from .wheel_build import HERE, Target


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that must be caught.

    stage: "compile", "link" or "check", where the complaint must come from. caught_by: words of it.
    source: a file of ``faults/`` that is linked in; "" for none. options: more of them for the
    link. replace: bytes of the linked module that are exchanged, for what no source can say.
    """

    name: str
    stage: str
    caught_by: str
    source: str = ""
    options: tuple[str, ...] = ()
    replace: tuple[bytes, bytes] | None = None


FAULTS = (
    Fault(
        "a function of MLX's headers that its library keeps to itself",
        "link", "undefined symbol: mlx::core::metal::allocator()", "not_exported_by_mlx.cpp",
    ),
    Fault(
        "the same, left for dyld to search",
        "check", "is not known to be in Python", "not_exported_by_mlx.cpp",
        options=("-Wl,-undefined,dynamic_lookup",),
    ),
    Fault(
        "a function that no framework has",
        "link", "undefined symbol: MTLCreateDeviceThatNeverWas", "not_in_framework.cpp",
    ),
    Fault(
        "metal-cpp's selectors a second time",
        "check", "it exports", "own_selectors.cpp",
    ),
    Fault("no signature", "check", "no code signature", options=("-Wl,-no_adhoc_codesign",)),
    Fault(
        "a search path too many", "check", "search paths", options=("-Wl,-rpath,/usr/local/lib",)
    ),
    Fault(
        "another nanobind",
        "check", "nanobind's tag is", replace=(b"nanobind_system", b"nanobind_systen"),
    ),
    Fault("another domain", "check", "domain", replace=(b"\0mlx\0", b"\0mly\0")),
)  # fmt: skip
# Only where the deployment target is older than what is used.
OLD_TARGET_FAULTS = (
    Fault(
        "a function newer than the oldest macOS",
        "compile", "unavailable", "newer_than_target.cpp",
    ),
)  # fmt: skip


def faults(target: Target) -> tuple[Fault, ...]:
    """Those that make sense for a target."""
    old = int(target.macos.split(".")[0]) < 26
    return FAULTS + (OLD_TARGET_FAULTS if old else ())


def verdict(target: Target, fault: Fault) -> str:
    """What happened in the place of catching the fault as it should be; "" where it was."""
    with tempfile.TemporaryDirectory() as folder:
        stage, said = _fate(target, fault, Path(folder))
    if stage == fault.stage and fault.caught_by in said:
        return ""
    return f"{fault.name}: stage {stage or 'none'} said {said.strip() or 'nothing'}"


def _fate(target: Target, fault: Fault, folder: Path) -> tuple[str, str]:
    """Which stage refused the fault, and its words."""
    objects = []
    if fault.source:
        objects.append(str(folder / "fault.o"))
        source = str(HERE / "faults" / fault.source)
        refused = refusal(target, [*compiling(target), "-o", objects[0], "-c", source])
        if refused:
            return "compile", refused
    module = folder / target.extension.name
    refused = refusal(target, [*linking(target), *objects, *fault.options, "-o", str(module)])
    if refused:
        return "link", refused
    if fault.replace:
        found, planted = fault.replace
        content = module.read_bytes()
        assert found in content, f"{found!r} is not in the module"
        module.write_bytes(content.replace(found, planted))
    said = binary_checks.complaints(target, module)
    return ("check", "\n".join(said)) if said else ("", "")
