"""Mesa's own library for its compiler, from OpenCL to SPIR-V: ``mesa_clc`` for Mesa's build.

Mesa has a program for it, which needs all of LLVM to be built; clang and a translator do as much.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.metal.occupancy.kernels import Tools, run

FRONT_END = (
    *("clang-19", "-x", "cl", "-cl-std=cl2.0", "-D__OPENCL_VERSION__=200", "-w"),
    *("-target", "spir64-unknown-unknown", "-Xclang", "-finclude-default-header"),
    *("-U__SPIR__", "-U__SPIRV__", "-Xclang", "-cl-ext=+all", "-Dcl_khr_subgroup_shuffle=1"),
    *("-Dcl_khr_subgroup_shuffle_relative=1", "-Dcl_khr_subgroup_ballot=1"),
    *("-Dcl_khr_expect_assume=1", "-O0", "-Xclang", "-disable-O0-optnone"),
    *("-Xclang", "-disable-llvm-passes", "-emit-llvm", "-c"),
)


def main(folder: str, arguments: list[str]) -> None:
    """``-o OUT --depfile FILE SOURCE... -- OPTION...``, as Mesa's build calls it."""
    values = {name: arguments[arguments.index(name) + 1] for name in ("-o", "--depfile")}
    rest = [its for its in arguments if its not in (*values, *values.values(), "--")]
    options = [its for its in rest if its.startswith("-")]
    with tempfile.TemporaryDirectory() as made:
        parts = []
        for number, source in enumerate(its for its in rest if not its.startswith("-")):
            parts.append(Path(made) / f"{number}.bc")
            run([*FRONT_END, *options, "-o", parts[-1], source])
        linked = Path(made) / "all.bc"
        run(["llvm-link-19", "-o", linked, *parts])
        translator = Tools(Path(folder)).translator
        run([*translator, "--spirv-max-version=1.4", "-o", values["-o"], linked])
    Path(values["--depfile"]).write_text(f"{values['-o']}:\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.cmd}: {error.stderr}")
