"""Metal kernel text as C++: ``python translate.py TEXT [OLD NEW]... > OUT.cpp``.

The text itself stays as it is but for what C++ cannot say. Lines keep their numbers.

* ``threadgroup T name[n];`` becomes a reference into the threadgroup's memory.
* ``template [[host_name("n")]] [[kernel]] decltype(f<...>) f<...>;`` becomes a launcher of that
  name; a kernel that is no template gets one of its own name.
* All other attributes are dropped, after those of kernels' parameters have become bindings.

Every OLD must stand in the text exactly once; NEW takes its place.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

PLACES = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_grid",
    "threadgroups_per_grid",
    "threads_per_threadgroup",
    "thread_index_in_threadgroup",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
)
KERNEL = re.compile(r"\[\[\s*kernel\b([^\]]*)\]\]\s*void\s+(\w+)\s*\(")
MAX_THREADS = re.compile(r"max_total_threads_per_threadgroup\((.*)\)")
INSTANCE = re.compile(
    r'^template \[\[host_name\("(\w+)"\)\]\] \[\[kernel\]\] decltype\((.+)\) (.+);$', re.MULTILINE
)
ARRAY = re.compile(r"^(\s*)threadgroup\s+([\w:]+)\s+(\w+)\s*\[(.*)\];", re.MULTILINE)
ATTRIBUTE = re.compile(r"\[\[[^\]]*\]\]")
DEVICE_THREADS = 1024


@dataclass(frozen=True)
class Kernel:
    """A kernel of the text: its parameters' bindings, and the most threads of a threadgroup."""

    name: str
    bindings: tuple[str, ...]
    max_threads: str
    is_template: bool


def split_parameters(text: str) -> list[str]:
    """Splits at the commas that stand outside all brackets."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "(<[{") - (character in ")>]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def parameters_of(text: str, start: int) -> list[str]:
    """The parameters of the list that opens just before ``start``."""
    end, depth = start, 1
    while depth:
        depth += (text[end] == "(") - (text[end] == ")")
        end += 1
    return split_parameters(text[start : end - 1])


def binding_of(parameter: str, kernel: str) -> str:
    """Raises ValueError for a parameter without a binding that the executor knows."""
    attributes = " ".join(ATTRIBUTE.findall(parameter))
    buffer = re.search(r"\bbuffer\((\d+)\)", attributes)
    if buffer:
        return f"{{::msl::Binding::buffer, {buffer[1]}}}"
    for place in PLACES:
        if re.search(rf"\b{place}\b", attributes):
            return f"{{::msl::Binding::{place}, 0}}"
    raise ValueError(f"{kernel}: no binding for the parameter {parameter!r}")


def kernels_of(text: str) -> dict[str, Kernel]:
    """All kernels that the text defines, by name."""
    found = {}
    for match in KERNEL.finditer(text):
        limit = MAX_THREADS.search(match[1])
        name = match[2]
        parameters = parameters_of(text, match.end())
        found[name] = Kernel(
            name,
            tuple(binding_of(parameter, name) for parameter in parameters),
            limit[1] if limit else str(DEVICE_THREADS),
            text[: match.start()].rstrip().endswith(">"),
        )
    return found


def launcher(name: str, expression: str, kernel: Kernel) -> str:
    """One line that makes launch_<name>."""
    bindings = ", ".join(kernel.bindings)
    return f"MSL_LAUNCHER({name}, ({expression}), {kernel.max_threads}, {{{bindings}}});"


def translate(text: str, path: str) -> str:
    """The C++ of a complete library text."""
    kernels = kernels_of(text)
    launchers = [
        launcher(name, expression, kernels[expression.split("<")[0]])
        for name, expression, _ in INSTANCE.findall(text)
    ]
    launchers += [launcher(k.name, k.name, k) for k in kernels.values() if not k.is_template]
    text = INSTANCE.sub("", text)
    text = ARRAY.sub(r"\1auto& \3 = msl_threadgroup_array<\2[\4]>();", text)
    text = ATTRIBUTE.sub("", text)
    head = f'#include "bind.h"\n#include <metal_stdlib>\n#line 1 "{path}"\n'
    return head + text + "\n".join(["", *launchers, ""])


def replaced(text: str, old: str, new: str) -> str:
    """Raises ValueError unless ``old`` stands in the text exactly once."""
    if text.count(old) != 1:
        raise ValueError(f"{old!r} stands {text.count(old)} times in the text")
    return text.replace(old, new)


def main() -> None:
    path, *edits = sys.argv[1:]
    text = Path(path).read_text()
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        text = replaced(text, old, new)
    sys.stdout.write(translate(text, path=Path(path).name))


if __name__ == "__main__":
    main()
