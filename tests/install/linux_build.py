"""Builds quire's wheel for one Python and one processor, where wheels.py runs it: in a root with a
compiler, with the tools of configs/locks/install.lock.

    python -m tests.install.linux_build PYTHON MACHINE HEADERS MLX WHEELS

Another Python than the one that runs the build is named by its headers, the suffix of its modules
and, afterwards, the wheel's tags. auditwheel says which platform's tag a wheel may have: it reads
which symbols of the C and the C++ library the module needs. MLX's library stays where MLX has it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import scikit_build_core.build
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

# The C library's minor version that MLX's own wheels need.
GLIBC = 35
PLATFORM = f"manylinux_2_{GLIBC}"
RPATH = "$ORIGIN/../mlx/lib"
ENTRY = "PyInit__ext"
LIBMLX = "libmlx.so"
# Beside MLX's, what an extension may ask for: all of it is in every root with Python.
SYSTEM = re.compile(r"lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so\.\d+|ld-linux.*\.so\.\d+")
CROSS = "{machine}-linux-gnu-{tool}"


def build(python: str, machine: str, headers: str, mlx: str, wheels: Path) -> Path:
    """Build the wheel, with its tags. Raises CalledProcessError."""
    os.environ["SETUPTOOLS_EXT_SUFFIX"] = suffix(python, machine)
    os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    os.environ["PYTHONPATH"] = mlx
    settings: dict[str, str | list[str]] = {
        "build-dir": f"/build/{machine}",
        "cmake.define.QUIRE_PYTHON_HEADERS": headers,
        "logging.level": "WARNING",
    }
    if machine != os.uname().machine:
        settings["cmake.define.CMAKE_SYSTEM_NAME"] = "Linux"
        settings["cmake.define.CMAKE_SYSTEM_PROCESSOR"] = machine
        for language, tool in (("C", "gcc"), ("CXX", "g++")):
            compiler = CROSS.format(machine=machine, tool=tool)
            settings[f"cmake.define.CMAKE_{language}_COMPILER"] = compiler
        settings["cmake.define.CMAKE_STRIP"] = (
            f"/usr/bin/{CROSS.format(machine=machine, tool='strip')}"
        )
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / scikit_build_core.build.build_wheel(folder, settings)
        wheel = audited(built, Path(folder) / "audited")
        version = "cp" + python.replace(".", "")
        tags = ["--python-tag", version, "--abi-tag", version]
        return retagged(wheel, [*tags, "--platform-tag", f"{PLATFORM}_{machine}"], wheels)


def audited(built: Path, folder: Path) -> Path:
    """Tag the wheel by auditwheel. Raises ValueError for one that needs a newer C library than
    MLX's."""
    repair = [sys.executable, "-m", "auditwheel", "repair", "--plat=auto", "--only-plat"]
    subprocess.run(
        [*repair, f"--exclude={LIBMLX}", f"--wheel-dir={folder}", str(built)], check=True
    )
    (wheel,) = folder.glob("*.whl")
    found = re.search(r"-manylinux_2_(?P<minor>\d+)_\w+\.whl$", wheel.name)
    if found is None or int(found["minor"]) > GLIBC:
        raise ValueError(f"{wheel.name} is for newer systems than {PLATFORM}")
    return wheel


def retagged(wheel: Path, tags: list[str], folder: Path) -> Path:
    command = [sys.executable, "-m", "wheel", "tags", "--remove", *tags, str(wheel)]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(shutil.move(wheel.with_name(said.stdout.split()[-1]), folder))


def suffix(python: str, machine: str) -> str:
    return f".cpython-{python.replace('.', '')}-{machine}-linux-gnu.so"


def complaints(wheel: Path, module: str) -> list[str]:
    found = []
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        libraries = [name for name in archive.namelist() if re.search(r"\.so[.\d]*$", name)]
        if libraries != [module]:
            found.append(f"its libraries are {libraries}, not {module} alone")
        with Path(archive.extract(module, folder)).open("rb") as stream:
            found += complaints_of_module(ELFFile(stream))
    return found


def complaints_of_module(elf: ELFFile) -> list[str]:
    """Return all that is wrong with an extension module, in sentences."""
    dynamic = elf.get_section_by_name(".dynamic")
    symbols = elf.get_section_by_name(".dynsym")
    assert isinstance(dynamic, DynamicSection)
    assert isinstance(symbols, SymbolTableSection)
    tags = list(dynamic.iter_tags())
    needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    paths = [
        tag.rpath if tag.entry.d_tag == "DT_RPATH" else tag.runpath
        for tag in tags
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")
    ]
    # Types of exceptions, and what the C++ library has in its headers, are the same everywhere.
    function = {"bind": "STB_GLOBAL", "type": "STT_FUNC"}
    offered = {
        symbol.name
        for symbol in symbols.iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF" and dict(symbol["st_info"]) == function
    }
    found = []
    if paths != [RPATH]:
        found.append(f"its search paths are {paths}, not {RPATH}")
    if LIBMLX not in needed:
        found.append(f"it does not ask for {LIBMLX}")
    strange = sorted(name for name in needed if name != LIBMLX and not SYSTEM.fullmatch(name))
    if strange:
        found.append(f"it asks for {strange}, which not every system has")
    if offered != {ENTRY}:
        found.append(f"it offers {sorted(offered)}, not {ENTRY} alone")
    return found


def main() -> int:
    python, machine, headers, mlx, wheels = sys.argv[1:]
    wheel = build(python, machine, headers, mlx, Path(wheels))
    wrong = complaints(wheel, f"metal_ext/_ext{suffix(python, machine)}")
    for sentence in wrong:
        print(f"WRONG: {wheel.name}: {sentence}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
