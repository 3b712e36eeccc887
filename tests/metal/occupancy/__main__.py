"""``python -m tests.metal.occupancy TOOLS PRINT_KERNELS`` writes METAL.md's table of occupancy.

With a kernel's name, and pairs of old and new text behind it, only says what comes of that kernel.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.metal.lint.lint import kernels_by_file
from tests.metal.occupancy.kernels import Occupancy, Tools, occupancy
from tests.metal.sheets import Section, table

SECTION = Section("metal-occupancy")
# Of each kernel one of its number types, bfloat, and its three head sizes and substrates.
SHOWN = "bfloat"
COLUMNS = ("threads", "half-registers", "threads per core", "groups per core", "instructions")


def shown(name: str) -> bool:
    """Whether the table has it: all of its number types are the same."""
    types = {part for part in name.split("_") if part in ("bfloat", "half", "float")}
    return types <= {SHOWN}


def cells(its: Occupancy) -> list[str]:
    """Of a line of the table."""
    spilled = f"{its.spills} spills, {its.scratch_bytes} bytes" if its.scratch_bytes else "none"
    numbers = (its.group, its.half_registers, its.threads, its.groups, its.instructions)
    return [*map(str, numbers), spilled]


def paragraphs(tools: Tools, print_kernels: str) -> Iterator[str]:
    """Of the section."""
    files = kernels_by_file(print_kernels)
    names = [name for _, all_names in sorted(files.items()) for name in all_names if shown(name)]
    yield (
        "As Mesa's compiler for an M1's GPU has them, which is not Apple's: registers of 16 bits "
        "of a thread, how many threads a core holds by them (1024 at most), how many of the "
        "kernel's threadgroups these are, and what does not fit into registers. Threadgroup memory "
        "is not in it; a kernel without a number of threads counts as a simdgroup."
    )
    rows = [[name, *cells(occupancy(tools, print_kernels, name))] for name in names]
    yield table(["kernel", *COLUMNS, "spilled"], rows)


def main(arguments: list[str]) -> int:
    """Writes the section; with a kernel's name prints its line."""
    folder, print_kernels, *rest = arguments
    tools = Tools(Path(folder).absolute())
    if not rest:
        return SECTION.main(paragraphs(tools, print_kernels), [])
    name, *edits = rest
    pairs = list(zip(edits[::2], edits[1::2], strict=True))
    found = cells(occupancy(tools, print_kernels, name, pairs))
    print(
        ", ".join(f"{its} {what}" for its, what in zip(found, (*COLUMNS, "spilled"), strict=True))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
