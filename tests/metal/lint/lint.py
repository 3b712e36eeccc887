"""Reads the kernels' texts as C++ for OpenCL, whose address spaces are MSL's.

``python -m tests.metal.lint.lint PRINT_KERNELS``: every kernel that the host can ask for must pass,
every bad variant must not. What the front end lets through although MSL does not, pointers and
references without an address space, is looked for in the syntax tree. Newer than C++14 nothing may
be: the oldest language that quire runs on is MSL 3.1. And no array of a thread may be left when the
optimizer is done: where it cannot be kept in registers it lies in the device's memory.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.metal.lint.variants import VARIANTS, Variant
from tests.metal.msl.translate import ARRAY, ATTRIBUTE, INSTANCE

GENERIC = "__generic"
INCLUDE = Path(__file__).parent / "include"
FEATURES = (
    "+cl_khr_fp16",
    "-cl_khr_fp64",
    "-__opencl_c_fp64",
    "-__opencl_c_pipes",
    "-__opencl_c_device_enqueue",
    "-__opencl_c_program_scope_global_variables",
)
COMMAND = (
    *("clang++-19", "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc"),
    *("-target", "x86_64-linux-gnu", "-D__METAL_VERSION__=310", f"-I{INCLUDE}"),
    *("-Xclang", f"-cl-ext={','.join(FEATURES)}", "-fno-color-diagnostics"),
    *("-Wall", "-Wextra", "-Wpre-c++17-compat", "-Werror"),
)
TREE = ("-fsyntax-only", "-Xclang", "-ast-dump")
OPTIMIZED = ("-O2", "-fno-vectorize", "-fno-slp-vectorize", "-emit-llvm", "-S", "-o", "-")
# A named variable, parameter or member of the syntax tree, and its type. The compiler's own copy
# constructors, and the header, have parameters without names.
DECLARATION = re.compile(
    r"(?:VarDecl|FieldDecl) 0x\w+ (?:\w+ 0x\w+ )*<[^\n]*?> \S+:\d+ (?:used |referenced )?"
    r"((?!used |referenced )[A-Za-z_]\w*) '([^'\n]*)'"
)


def kernels_by_file(print_kernels: str) -> dict[str, list[str]]:
    """All kernels' names, under the name of the file that holds them."""
    listing = subprocess.run([print_kernels], capture_output=True, text=True, check=True).stdout
    files = defaultdict(list)
    for line in listing.splitlines():
        name, file = line.split()
        files[file].append(name)
    return files


def library_text(print_kernels: str, names: list[str]) -> str:
    """What the host would compile for these kernels, which are of one file."""
    command = [print_kernels, *names]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def as_opencl(text: str, most: int | None = None) -> str:
    """The text without attributes; its instances, ``most`` of them, as uses of the templates."""
    expressions = [expression for _, expression, _ in INSTANCE.findall(text)][:most]
    text = INSTANCE.sub("", text)
    text = ARRAY.sub(r"\1threadgroup auto& \3 = msl_threadgroup_array<\2[\4]>();", text)
    text = ATTRIBUTE.sub("", text)
    uses = "".join(
        f"  *use = reinterpret_cast<ulong>(&{expression});\n" for expression in expressions
    )
    return f"{text}\nvoid use_instances(volatile thread ulong* use) {{\n{uses}  *use = 0;\n}}\n"


def run(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The front end over a source on its standard input."""
    command = [*COMMAND, *options, "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False)


def complaints(text: str) -> list[str]:
    """What is wrong with a library text; empty where nothing is."""
    done = run(as_opencl(text), *OPTIMIZED)
    errors = re.findall(r"error: (.*)", done.stderr)
    errors += [f"an array in memory: {kind}" for kind in re.findall(r"= alloca (.*),", done.stdout)]
    # Pointers to a template's types get their address space in its instances: one shows them all.
    declared = DECLARATION.findall(run(as_opencl(text, most=1), *TREE).stdout)
    assert declared, "the syntax tree cannot be read"
    return errors + [
        f"no address space: {kind} {name}" for name, kind in declared if GENERIC in kind
    ]


def check_variant(print_kernels: str, variant: Variant) -> str | None:
    """Why the variant is rejected; None where it is not."""
    text = library_text(print_kernels, [variant.kernel])
    assert text.count(variant.old) == 1, f"{variant.what}: {variant.old!r} is not there once"
    found = complaints(text.replace(variant.old, variant.new))
    return found[0] if found else None


def main() -> None:
    print_kernels = sys.argv[1]
    failures = 0
    files = kernels_by_file(print_kernels)
    for file, names in sorted(files.items()):
        found = complaints(library_text(print_kernels, names))
        failures += bool(found)
        print(f"{file:16} {len(names):3} kernels  {found[0] if found else 'ok'}")
    for variant in VARIANTS:
        reason = check_variant(print_kernels, variant)
        failures += reason is None
        print(f"{variant.what:44} {'NOT REJECTED' if reason is None else reason[:100]}")
    total = sum(len(names) for names in files.values())
    print(
        f"metal-lint: {total} kernels of {len(files)} texts read, {len(VARIANTS)} bad variants, "
        f"{failures} failures"
    )
    sys.exit(failures != 0)


if __name__ == "__main__":
    main()
