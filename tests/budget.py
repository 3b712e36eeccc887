"""Hold the project to configs/budget.toml: `python -m tests.budget`, a part of `make check`.

A room is a top-level folder; `root` has the files beside the folders, and `whole` the figures of no
single room. A figure above its budget is an error that names both. A budget rises only in a commit
that changes nothing else, and whose subject says what was bought: "budget: 1500 lines of server for
agents' tools". `--lower` lowers the budgets to today's figures.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp

from engine.config import EngineConfig
from kvcache.config import CacheSettings
from server.config import Config, settings_of

ROOT = Path(__file__).parents[1]
TABLE = "configs/budget.toml"
PACKAGES = ("server", "engine", "kvcache", "metal_ext")
Figures = dict[str, dict[str, int]]
"""``{room: {figure: count}}``."""

SUFFIXES = {
    *(".py", ".pyi", ".cpp", ".h", ".c", ".metal", ".js", ".mjs", ".css", ".html"),
    *(".sh", ".cmake", ".mk"),
}
NAMES = {"Makefile", "Dockerfile", "CMakeLists.txt", "run"}
VENDORED = "vendor"
SMALL_FILE_LINES = 60
# A family is a table of a model's names: one small file each.
SMALL_BY_NATURE = "engine/models/families/"
# They name nothing. To parse all tests takes seconds.
VAGUE_NAMES = {"its", "found", "said", "asked", "most", "made"}
RAISE = "budget: "
# A commit that landed has passed this check: late ones alone are looked at.
COMMITS = "--max-count=20"
HEAD = """\
# What each room may hold at most. `make check` fails above it (tests/budget.py says how it counts).
# A figure rises only in a commit that changes nothing else; its subject says what was bought, as in
# "budget: 1500 lines of server for agents' tools". `python -m tests.budget --lower` lowers.

"""


def room_of(path: str) -> str:
    folder, slash, _ = path.partition("/")
    return folder if slash and not folder.startswith(".") else "root"


def git(*arguments: str, root: Path = ROOT) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def bindings(tree: ast.AST) -> Iterator[str]:
    """Yield each name that a module gives to a value, a parameter, a function or a class."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                yield name


def count_files(root: Path = ROOT) -> Figures:
    """Count the files that git knows, or would add, by room."""
    rooms: Figures = defaultdict(lambda: defaultdict(int))
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", root=root)
    for name in listed.splitlines():
        path, room = root / name, rooms[room_of(name)]
        if VENDORED in path.parts or not path.is_file():
            continue
        if path.suffix == ".md":
            room["words"] += len(path.read_text().split())
        if path.suffix not in SUFFIXES and path.name not in NAMES:
            continue
        text = path.read_text()
        lines = len(text.splitlines())
        room["lines"] += lines
        room["files"] += 1
        room["small_files"] += lines <= SMALL_FILE_LINES and not name.startswith(SMALL_BY_NATURE)
        if path.suffix == ".py" and room is not rooms["tests"]:
            room["vague_names"] += sum(name in VAGUE_NAMES for name in bindings(ast.parse(text)))
    return rooms


def count_settings() -> dict[str, int]:
    """Count the settings of the file's tables by the room that declares them."""
    total = sum(len(table) for table in Config().model_dump().values())
    own = {"kvcache": len(settings_of(CacheSettings)), "engine": len(settings_of(EngineConfig))}
    return own | {"server": total - sum(own.values())}


def count_step_statements(source: str) -> int:
    """Count the simple statements of EngineLoop.step, those within an `if` included."""
    (step,) = (
        method
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == "EngineLoop"
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "step"
    )
    statements = [node for node in ast.walk(step) if isinstance(node, ast.stmt)]
    compound = [node for node in statements if hasattr(node, "body")]
    return len(statements) - len(compound) - (ast.get_docstring(step) is not None)


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or through others."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = imports[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    reachable = {module: reach(module) for module in imports}
    around = {
        frozenset(other for other in reachable[module] if module in reachable[other])
        for module in imports
    }
    return [set(circle) for circle in around if circle]


def count_imports() -> dict[str, int]:
    """Count the circles of imports, those under TYPE_CHECKING included, and the contracts'
    exceptions."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    # `from . import _ext` seems to import the package: what it names is no module of Python's.
    imports = {
        module: {
            imported
            for imported in graph.find_modules_directly_imported_by(module)
            if not module.startswith(f"{imported}.")
        }
        for module in graph.modules
    }
    closed = circles(imports)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    exceptions = [len(one.get("ignore_imports", ())) for one in contracts["contracts"]]
    return {
        "circles": len(closed),
        "modules_in_circles": sum(len(circle) for circle in closed),
        "contract_exceptions": sum(exceptions),
    }


def count_all() -> Figures:
    rooms = {room: dict(figures) for room, figures in count_files().items()}
    for room, settings in count_settings().items():
        rooms[room]["settings"] = settings
    step = count_step_statements((ROOT / "engine/step/loop.py").read_text())
    return {**rooms, "whole": {**count_imports(), "step_statements": step}}


def excesses(figures: Figures, budget: Figures) -> list[str]:
    """Return a line for each figure that is above its budget; without a budget it is 0."""
    return [
        f"{room}: {count} {figure}, and its budget is {budget.get(room, {}).get(figure, 0)}"
        for room, counts in figures.items()
        for figure, count in counts.items()
        if count > budget.get(room, {}).get(figure, 0)
    ]


def read_table(root: Path, commit: str) -> Figures | None:
    """Return the budgets of a commit, or None."""
    if not git("ls-tree", commit, TABLE, root=root):
        return None
    return tomllib.loads(git("show", f"{commit}:{TABLE}", root=root))


def unpaid_raises(root: Path = ROOT) -> list[str]:
    """Return a line for each late commit that raised a budget among other changes, or without
    saying for what. In a shallow clone, the oldest commit has no parent to compare with."""
    lines = []
    history = git("log", "--no-merges", COMMITS, "--format=%h %p\t%s", "--", TABLE, root=root)
    for commit, *parents, subject in (
        re.split(r"[ \t]", line, maxsplit=2) for line in history.splitlines()
    ):
        before = read_table(root, parents[0]) if parents[0] else None
        raised = excesses(read_table(root, commit) or {}, before) if before is not None else []
        changed = git("show", "--format=", "--name-only", commit, root=root).split()
        if raised and not (changed == [TABLE] and subject.startswith(RAISE)):
            lines += [f'commit {commit}, "{subject}", raises {raise_}' for raise_ in raised]
    return lines


def format_table(figures: Figures) -> str:
    """Return the table as TOML, one line a room."""
    lines = (
        f"{room:<10}= {{ {', '.join(f'{name} = {count}' for name, count in counts.items())} }}\n"
        for room, counts in sorted(figures.items())
    )
    return HEAD + "".join(lines)


def lower(figures: Figures, budget: Figures) -> Figures:
    """Return the lesser of each figure and its budget; figures that are gone have none."""
    return {
        room: {name: min(count, budget[room].get(name, 0)) for name, count in counts.items()}
        for room, counts in figures.items()
        if room in budget
    }


def main(arguments: list[str]) -> int:
    """1 when a figure is above its budget, or a budget was raised beside other changes."""
    figures, budget = count_all(), tomllib.loads((ROOT / TABLE).read_text())
    if arguments == ["--lower"]:
        (ROOT / TABLE).write_text(format_table(lower(figures, budget)))
    errors = excesses(figures, budget) + unpaid_raises()
    for error in errors:
        print(f"{TABLE}: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
