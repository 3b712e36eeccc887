"""What an extension module for a Mac imports and exports, and how two builds of it differ.

    python symbols.py write MODULE > symbols.json
    python symbols.py compare CROSS.json NATIVE.json

Two compilers inline differently, so that the symbols that they import are not quite the same: such
differences are printed, and so are exports beside Python's entry, such as the type information that
Apple's C++ library leaves. Three things must be equal: the loaded libraries, the symbols that dyld
searches for, and nanobind's tag. The entry must be there. If one of these fails, the exit code is
1.
"""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

SEARCHED = "dynamically looked up"
IMPORT = re.compile(r"\(undefined\).* external (\S+) \((?:from (\S+)|" + SEARCHED + r")\)")
EXPORT = re.compile(r"^[0-9a-f]+ \([^)]*\) (?:weak )?external (\S+)$")
NANOBIND_TAG = re.compile(rb"nanobind_\w*_v\d+\0")
PYTHON_NAMES = ("_Py", "__Py")
ENTRY = "_PyInit__ext"


@dataclasses.dataclass(frozen=True)
class Symbols:
    """imports: by library, as ``nm`` calls it, such as "libc++" or "Metal"; what dyld searches for
    stands under ``SEARCHED``."""

    imports: dict[str, list[str]]
    exports: list[str]
    nanobind: str


def symbols_in(listing: str, content: bytes) -> Symbols:
    """listing: what ``nm -m`` prints of the module. content: the module itself."""
    imports: dict[str, list[str]] = {}
    for symbol, library in IMPORT.findall(listing):
        imports.setdefault(library or SEARCHED, []).append(symbol)
    exports = [found[1] for line in listing.splitlines() if (found := EXPORT.match(line))]
    (tag,) = set(NANOBIND_TAG.findall(content))
    return Symbols(
        imports={library: sorted(names) for library, names in sorted(imports.items())},
        exports=sorted(exports),
        nanobind=tag.rstrip(b"\0").decode(),
    )


def differences(cross: Symbols, native: Symbols) -> tuple[list[str], list[str]]:
    """What is wrong, and what is merely another compiler's taste, in sentences."""
    wrong, taste = [], []
    if cross.exports != native.exports:
        taste.append(f"exports: {cross.exports} in the cross build, {native.exports} here")
    if cross.nanobind != native.nanobind:
        wrong.append(f"nanobind's tag: {cross.nanobind} in the cross build, {native.nanobind} here")
    for build, symbols in (("the cross build", cross), ("this build", native)):
        wrong += [] if ENTRY in symbols.exports else [f"{ENTRY} is not exported by {build}"]
        searched = symbols.imports.get(SEARCHED, [])
        stray = [name for name in searched if not name.startswith(PYTHON_NAMES)]
        wrong += [f"{name} is left for dyld to search in {build}" for name in stray]
    for library in sorted({*cross.imports, *native.imports}):
        ours, theirs = set(cross.imports.get(library, ())), set(native.imports.get(library, ()))
        if not (ours and theirs):
            wrong.append(f"{library}: of {'the cross build' if ours else 'this build'} alone")
            continue
        taste += [f"{library}: {name} in the cross build alone" for name in sorted(ours - theirs)]
        taste += [f"{library}: {name} in this build alone" for name in sorted(theirs - ours)]
    return wrong, taste


def main(arguments: list[str]) -> int:
    """The exit code."""
    if arguments[0] == "write":
        module = Path(arguments[1])
        nm = shutil.which("llvm-nm-19") or "nm"
        listing = subprocess.run([nm, "-m", module], check=True, capture_output=True, text=True)
        found = symbols_in(listing.stdout, module.read_bytes())
        print(json.dumps(dataclasses.asdict(found), indent=1))
        return 0
    cross, native = (Symbols(**json.loads(Path(path).read_text())) for path in arguments[1:3])
    wrong, taste = differences(cross, native)
    for sentence in taste:
        print(f"differs: {sentence}")
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    count = sum(map(len, native.imports.values()))
    print(f"{count} imports, {len(taste)} of them differ, {len(wrong)} things are wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
