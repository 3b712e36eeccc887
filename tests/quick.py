"""Choose the tests of the files that were touched, and run them: `make quick`.

A source is tested by its mirror (engine/build.py: tests/engine/test_build.py), by the tests of its
room that import it, and by the mirrors of the sources of its room that import it. Where that finds
nothing, all tests of the room run. A room is a folder of tests/. Tests of other rooms are left to
`make test`, and are counted.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine", "kvcache", "metal_ext", "tests")
MAIN = "main"
# They read every file, and take a second or two.
ALWAYS = ("tests/test_tidy.py", "tests/test_makefile.py")


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none where it fails."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def touched() -> list[str]:
    """Return what differs from where this branch left main, or, where there is no main, from the
    last commit; as paths below the root."""
    (base,) = git("merge-base", "HEAD", MAIN) or ["HEAD"]
    print(f"what differs from {base}:")
    return git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")


def room_of(path: str) -> Path:
    """Return the folder that mirrors the path's: tests/ itself for files that have none."""
    parts = Path(path).parts[path.startswith("tests/") :]
    room = Path("tests", *parts[:1])
    return room if len(parts) > 1 and (ROOT / room).is_dir() else Path("tests")


def mirror(module: str) -> str:
    """Return the name of the module of tests that mirrors a source."""
    package, _, name = module.rpartition(".")
    return f"tests.{package}.test_{name}"


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def imports_of(file: Path) -> Iterator[str]:
    """Yield the names that a file imports, modules or not."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (module, *(f"{module}.{alias.name}" for alias in names))


def importers() -> dict[str, set[str]]:
    """Return the modules that import each module directly."""
    graph: dict[str, set[str]] = defaultdict(set)
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for name in imports_of(file):
            graph[name].add(module_of(str(file.relative_to(ROOT))))
    return graph


def depending_on(module: str, graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that may be wrong when this one is."""
    if module.startswith("tests."):
        seen, ahead = {module}, [module]
        while ahead:
            ahead += (new := graph[ahead.pop()] - seen)
            seen |= new
        return seen
    room = module.partition(".")[0]
    sources = {module, *(name for name in graph[module] if name.startswith(f"{room}."))}
    return graph[module] | {mirror(source) for source in sources}


def tests_of(path: str, graph: dict[str, set[str]]) -> set[str]:
    """Return the files of tests, or the folder, that test a path."""
    room = room_of(path)
    modules = depending_on(module_of(path), graph) if path.endswith(".py") else set()
    files = {name.replace(".", "/") + ".py" for name in modules}
    tests = {file for file in files if room in Path(file).parents and is_test(file)}
    chosen = {file for file in tests if (ROOT / file).exists()}
    if chosen or (is_test(path) and not (ROOT / path).exists()):
        return chosen
    return {str(room)} if room != Path("tests") else set()


def is_test(file: str) -> bool:
    return file.startswith("tests/") and Path(file).name.startswith("test_")


def main(rooms: list[str]) -> int:
    """rooms: names of folders of tests/ to run in whole; none: the tests of what was touched."""
    chosen = {f"tests/{room}" for room in rooms}
    if unknown := [folder for folder in chosen if not (ROOT / folder).is_dir()]:
        sys.exit(f"make quick: there is no folder {unknown[0]}")
    graph = importers()
    for path in [] if rooms else touched():
        tests = tests_of(path, graph)
        print(f"{path}: {' '.join(sorted(tests)) or 'none'}")
        chosen |= tests
    chosen |= {*ALWAYS}
    every = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [file for file in every if chosen & {file, str(room_of(file))}]
    left = len(every) - len(files)
    print(f"{len(files)} files of tests run; {left} others are left to make test", flush=True)
    command = [sys.executable, "-m", "pytest", "-n", "auto", *files]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
