"""From a kernel's text to what Mesa's compiler says of it.

The text is C++ for OpenCL, as the lint reads it, with an entry point that takes addresses. LLVM
only inlines and unrolls it, and keeps what is private out of memory: the rest is Mesa's work.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.metal.lint.lint import FEATURES, library_text
from tests.metal.msl.translate import (
    ARRAY,
    ATTRIBUTE,
    INSTANCE,
    KERNEL,
    MAX_THREADS,
    parameters_of,
    replaced,
)

HERE = Path(__file__).parent
INCLUDES = (HERE / "include", HERE.parent / "lint" / "include")
ENTRY = "entry_point"
# Bytes from one threadgroup array to the next: as much as a threadgroup has.
ARRAY_STRIDE = 32768
# A simdgroup, where a kernel says nothing.
SIMDGROUP = "32"
PLACES = {
    "thread_position_in_grid": "get_global_id({})",
    "threads_per_grid": "get_global_size({})",
    "threadgroup_position_in_grid": "get_group_id({})",
    "threadgroups_per_grid": "get_num_groups({})",
    "thread_index_in_threadgroup": "get_local_id(0)",
    "simdgroup_index_in_threadgroup": "get_sub_group_id()",
    "thread_index_in_simdgroup": "get_sub_group_local_id()",
}
FRONT_END = (
    *("clang++-19", "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-w"),
    *("-target", "spir64-unknown-unknown", "-D__METAL_VERSION__=310", "-fno-discard-value-names"),
    *("-Xclang", f"-cl-ext={','.join((*FEATURES, '+__opencl_c_subgroups'))}"),
    *("-O1", "-Xclang", "-disable-llvm-passes", "-emit-llvm", "-c"),
)
UNROLLED = "loop-simplify,lcssa,loop(loop-rotate,indvars,loop-unroll-full)"
SIMPLER = "sroa<modify-cfg>,early-cse,simplifycfg"
PASSES = (
    "forceattrs,internalize,always-inline,globaldce,"
    f"function({SIMPLER},{UNROLLED},{SIMPLER},{UNROLLED},{SIMPLER},gvn,adce,simplifycfg),globaldce"
)
EXTENSIONS = (
    "--spirv-ext=+SPV_KHR_no_integer_wrap_decoration,+SPV_KHR_float_controls,"
    "+SPV_KHR_expect_assume,+SPV_KHR_linkonce_odr"
)
# What the translator and Mesa stumble over: hints for loops, how much may be read behind a pointer,
# and C++, whose built-ins have other names.
DROPPED = re.compile(
    r", !llvm\.loop !\d+|\bdereferenceable\(\d+\) ?|^!opencl\.cxx.*\n", re.MULTILINE
)
STATISTICS = re.compile(
    r"(\d+) inst, (\d+) alu, .* (\d+) regs, (\d+) uniforms, (\d+) scratch, (\d+) threads, "
    r"(\d+) loops, (\d+):(\d+) spills:fills"
)


@dataclass(frozen=True, slots=True)
class Tools:
    """Where ``tools`` has put them."""

    folder: Path

    @property
    def compiler(self) -> Path:
        """Mesa's, for kernels in SPIR-V."""
        return self.folder / "build" / "src/asahi/clc/asahi_clc"

    @property
    def translator(self) -> list[str]:
        """From LLVM to SPIR-V: a newer system's, with that system's libraries."""
        root = self.folder / "root/usr"
        libraries = [root / "lib/x86_64-linux-gnu", root / "lib/llvm-19/lib"]
        loader = libraries[0] / "ld-linux-x86-64.so.2"
        path = ":".join(map(str, libraries))
        return [str(loader), "--library-path", path, str(root / "bin/llvm-spirv-19"), EXTENSIONS]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What the compiler says of a kernel."""

    instructions: int
    arithmetic: int
    half_registers: int
    """Of 16 bits, of a thread."""
    threads: int
    """The most that a core holds, by these registers."""
    group: int
    """Threads of a threadgroup."""
    scratch_bytes: int
    spills: int

    @property
    def groups(self) -> int:
        """Threadgroups that a core holds, by registers."""
        return self.threads // self.group


def entry_point(text: str, name: str) -> str:
    """The text as OpenCL, with one entry point for the kernel of that name."""
    expression = next((e for n, e, _ in INSTANCE.findall(text) if n == name), name)
    function = expression.split("<")[0]
    match = next(m for m in KERNEL.finditer(text) if m[2] == function)
    limit = MAX_THREADS.search(match[1])
    taken, given = [], []
    for number, parameter in enumerate(parameters_of(text, match.end())):
        if re.search(r"\bbuffer\(\d+\)", parameter):
            taken.append(f"ulong buffer{number}")
            kind = f"Parameters<decltype({expression})>::At<{number}>"
            given.append(f"From<{kind}>::address(buffer{number})")
        else:
            given.append(place_of(parameter))
    text = INSTANCE.sub("", text)
    addresses = iter(range(16, 64 * ARRAY_STRIDE, ARRAY_STRIDE))
    text = ARRAY.sub(
        lambda m: (
            f"{m[1]}threadgroup auto& {m[3]} = "
            f"msl_threadgroup_array<{m[2]}[{m[4]}], {next(addresses)}>();"
        ),
        text,
    )
    size = f"reqd_work_group_size({limit[1] if limit else SIMDGROUP}, 1, 1)"
    return (
        f"{ATTRIBUTE.sub('', text)}\n"
        f'extern "C" __attribute__(({size}))'
        f" __kernel void {ENTRY}({', '.join(taken)}) {{\n  {expression}({', '.join(given)});\n}}\n"
    )


def place_of(parameter: str) -> str:
    """What a parameter that is no buffer is given. Raises ValueError for one that is not known."""
    for place, call in PLACES.items():
        if re.search(rf"\b{place}\b", parameter):
            size = next((n for n in (3, 2) if f"uint{n}" in parameter), 1)
            parts = ", ".join(f"uint({call.format(axis)})" for axis in range(size))
            return parts if size == 1 else f"uint{size}({parts})"
    raise ValueError(f"what to give for {parameter!r}?")


def occupancy(
    tools: Tools, print_kernels: str, name: str, edits: Sequence[tuple[str, str]] = ()
) -> Occupancy:
    """Of a kernel. edits: what stands once in its text, and what takes its place.

    Raises subprocess.CalledProcessError with what a tool said.
    """
    text = library_text(print_kernels, [name])
    for old, new in edits:
        text = replaced(text, old, new)
    folder = tools.folder / "kernels"
    folder.mkdir(exist_ok=True)
    source, code, llvm, spirv = (folder / f"{name}.{end}" for end in ("cpp", "bc", "ll", "spv"))
    source.write_text(entry_point(text, name))
    run([*FRONT_END, *(f"-I{its}" for its in INCLUDES), "-o", code, source])
    inlined = ("--force-attribute=alwaysinline", f"--internalize-public-api-list={ENTRY}")
    run(["opt-19", "-S", *inlined, f"-passes={PASSES}", "-o", llvm, code])
    kept = DROPPED.sub("", llvm.read_text()).replace("= !{i32 3, i32 0}", "= !{i32 2, i32 0}")
    llvm.write_text(kept)
    run(["llvm-as-19", "-o", code, llvm])
    run([*tools.translator, "--spirv-max-version=1.4", "-o", spirv, code])
    said = run([tools.compiler, spirv, folder / "unused.h", folder / "unused.c"])
    found = STATISTICS.findall(said)
    assert len(found) == 1, said
    instructions, arithmetic, registers, _, scratch, threads, _, spills, _ = map(int, found[0])
    group = re.search(r"!reqd_work_group_size !(\d+)", kept)
    assert group is not None
    size = re.search(rf"^!{group[1]} = !{{i32 (\d+)", kept, re.MULTILINE)
    assert size is not None
    return Occupancy(
        instructions, arithmetic, registers, threads, int(size[1]), scratch, spills
    )  # fmt: skip


def run(command: Sequence[str | Path]) -> str:
    """What a tool says."""
    variables = os.environ | {
        "AGX_MESA_DEBUG": "shaderdb,internal",
        "MESA_SHADER_CACHE_DISABLE": "true",
    }
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=variables, check=False
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command[0], done.stdout, done.stderr)
    return done.stdout + done.stderr
