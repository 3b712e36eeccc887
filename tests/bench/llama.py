"""llama-server for every instruction set of this processor: ``python -m tests.bench.llama``.

llama.cpp's sources are those of the package llama-cpp-python, by the version and the hash of
llama.lock. llama-server and llama-quantize are built once, with the kernels of the best instruction
set, and for each other one the library of kernels alone, libggml-cpu.so: LD_LIBRARY_PATH puts it
before the first one's. So servers differ in their kernels and in nothing else::

    FOLDER/llama_cpp_python-0.3.36/   sources
    FOLDER/bf16/bin/                  llama-server, llama-quantize, and all libraries
    FOLDER/avx2/bin/                  libggml-cpu.so, and what it needs

What is there already is left as it is. quire's sse2 has no peer: llama.cpp without AVX2 is nothing
that anybody is served by. On arm64 there is one build, for the processor that it is built on.

Needs a C++ compiler, and cmake and ninja: the packages cmake and ninja will do, which
`make setup` brings. Takes a quarter of an hour on two cores, and 1 GB.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import metal_ext

LOCK = Path(__file__).parent / "llama.lock"
DEFAULT_FOLDER = Path(tempfile.gettempdir()) / "quire-bench" / "llama"
AVX2 = ("SSE42", "AVX", "F16C", "FMA", "AVX2", "BMI2")
VNNI = (*AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI")
BF16 = (*VNNI, "AVX512_BF16")
FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*BF16, "AMX_TILE", "AMX_INT8", "AMX_BF16"),
    "bf16": BF16,
    "vnni": VNNI,
    "avx512": (*AVX2, "AVX512"),
    "avx2": AVX2,
    "dotprod": ("NATIVE",),
}
"""llama.cpp's build flags by quire's names of instruction sets; best first."""
SOMETIMES = {"AVX512_VBMI": "avx512vbmi"}
"""Flags that some processors of a set lack, and Linux's names for them."""
COMMON = (
    "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_UI=OFF", "-DGGML_OPENMP=ON",
)  # fmt: skip
PROGRAMS = ("llama-server", "llama-quantize")
LIBRARY = "libggml-cpu.so"
NICE = 10


class BuildError(OSError):
    """There is no such llama-server; the message is a sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.llama",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "where sources and builds go, and stay (default: %(default)s)"
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help=text)
    folder = parser.parse_args(arguments).folder
    try:
        names = here()
        build(folder, names)
        builds = Builds(folder)
        for name in names:
            print(f"{name}: {builds.kernels(name)}")
    except BuildError as error:
        print(f"no llama-server: {error}", file=sys.stderr)
        return 1
    return 0


def here() -> list[str]:
    """Return this processor's instruction sets that llama.cpp is built for, best first. Raises
    BuildError without any."""
    names = [name for name in metal_ext.instruction_sets() if name in FLAGS]
    if not names:
        raise BuildError(f"this processor has none of {', '.join(FLAGS)}")
    return names


class Builds:
    """The builds below a folder. Everything raises BuildError where it is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    @property
    def programs(self) -> Path:
        found = self.find_programs()
        if found is None:
            raise BuildError(f"none lies below {self._folder}: python -m tests.bench.llama")
        return found

    def find_programs(self) -> Path | None:
        """Return the folder with llama-server and llama-quantize, or None before they were
        built."""
        for name in FLAGS:
            folder = self._folder / name / "bin"
            if all((folder / program).exists() for program in PROGRAMS):
                _check_sources(folder.parent)
                return folder
        return None

    def kernels(self, name: str) -> Path:
        """Return the folder with the kernels of an instruction set."""
        folder = self._folder / name / "bin"
        if not (folder / LIBRARY).exists():
            raise BuildError(
                f"no kernels for {name} lie below {self._folder}: python -m tests.bench.llama"
            )
        _check_sources(folder.parent)
        return folder


def version() -> str:
    """Return the name and version of the package with the sources."""
    name, number = LOCK.read_text().split(" ")[0].split("==")
    return f"{name} {number}"


def _check_sources(folder: Path) -> None:
    """Raise BuildError when a folder was built from another version."""
    cache = (folder / "CMakeCache.txt").read_text()
    found = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", cache, re.MULTILINE)
    source = Path(found[1]).resolve() if found else Path()
    if _unpacked() not in source.parts:
        raise BuildError(f"{folder} was built from {source}, not from {version()}: remove {folder}")


# --- building ------------------------------------------------------------------------------------


def build(folder: Path, names: Sequence[str]) -> None:
    """Build whatever is missing. names: instruction sets, best first. Raises BuildError."""
    whole = names[0] if Builds(folder).find_programs() is None else ""
    has = _processor_flags()
    for name in names:
        done = (folder / name / "bin" / LIBRARY).exists()
        if done and name != whole:
            continue
        targets = PROGRAMS if name == whole else ("ggml-cpu",)
        for command in commands(sources(folder), folder / name, definitions(name, has), targets):
            _run(command)


def definitions(name: str, has: Collection[str]) -> list[str]:
    """Return cmake's options for every instruction that llama.cpp may be built with. has: the
    processor's flags by Linux."""
    wanted = {flag for flag in FLAGS[name] if flag not in SOMETIMES or SOMETIMES[flag] in has}
    known = dict.fromkeys(flag for flags in FLAGS.values() for flag in flags)
    return [f"-DGGML_{flag}={'ON' if flag in wanted else 'OFF'}" for flag in known]


def commands(
    source: Path, folder: Path, defined: Sequence[str], targets: Sequence[str]
) -> list[list[str]]:
    cmake, ninja = _program("cmake"), _program("ninja")
    configure = [cmake, "-S", str(source), "-B", str(folder), *COMMON, *defined]
    return [[*configure, f"-DCMAKE_MAKE_PROGRAM={ninja}"], [ninja, "-C", str(folder), *targets]]


def sources(folder: Path) -> Path:
    """Return llama.cpp's sources, fetched and unpacked once: whole or not at all."""
    unpacked = folder / _unpacked()
    if not unpacked.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            _run(
                [
                    sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input",
                    "download", "--quiet", "--require-hashes", "--requirement", str(LOCK),
                    "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", made,
                ]
            )  # fmt: skip
            with tarfile.open(Path(made) / f"{unpacked.name}.tar.gz") as archive:
                archive.extractall(made, filter="data")
            _without_git(Path(made) / unpacked.name / "vendor" / "llama.cpp")
            (Path(made) / unpacked.name).rename(unpacked)
    return unpacked / "vendor" / "llama.cpp"


def _unpacked() -> str:
    return version().replace("-", "_").replace(" ", "-")


def _without_git(source: Path) -> None:
    """Remove the archive's part of a repository: ninja would wait for its index for ever."""
    git = source / ".git"
    if git.is_dir():
        shutil.rmtree(git)
    else:
        git.unlink(missing_ok=True)


def _program(name: str) -> str:
    """Find a program beside this Python, or on the path."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if found is None:
        raise BuildError(f"{name} is missing: pip install {name}")
    return found


def _processor_flags() -> set[str]:
    """Return Linux's list of the processor's flags; all that matter on other systems."""
    try:
        found = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return set(SOMETIMES.values()) if found is None else set(found[1].split())


def _run(command: Sequence[str]) -> None:
    """Run with a low priority, its output on the terminal."""
    done = subprocess.run(["nice", "-n", str(NICE), *command], stdout=sys.stderr)
    if done.returncode != 0:
        raise BuildError(f"{Path(command[0]).name} ended with code {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
