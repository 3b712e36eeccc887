"""The table of mistakes, and how one is put into a source.

A mistake takes the place of an expression that stands once in a function: it is found there however
its lines are wrapped, and wherever the function lies.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What of a suite can be asked to find a mistake: the first, where the mistake names none.
PARTS = {
    "core": ("rules", "lives"),
    "kernels": ("small", "asan", "races"),
    "simulation": ("seeds", "states", "mac"),
}
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class AnchorError(ValueError):
    """The right expression does not stand once in functions of that name."""


@dataclass(frozen=True)
class Mistake:
    """A row of mistakes.toml, which says what it holds."""

    suite: str
    file: str
    name: str
    function: str
    right: str
    wrong: str
    by: Sequence[str] = ()
    seed: int = 0

    @property
    def parts(self) -> Sequence[str]:
        assert set(self.by) <= set(PARTS[self.suite]), f"{self.name}: {self.by}"
        return self.by or PARTS[self.suite][:1]

    def plant(self, text: str) -> str:
        """Return the source with the mistake. Raises AnchorError."""
        find = python_functions if self.file.endswith(".py") else native_functions
        places = [
            place
            for start, end in find(text, self.function)
            for place in pattern(self.right).finditer(text, start, end)
        ]
        if len(places) != 1:
            raise AnchorError(
                f"{self.file} has {len(places)} times, not once, in {self.function}: {self.right}"
            )
        return text[: places[0].start()] + self.wrong + text[places[0].end() :]


def read_mistakes() -> list[Mistake]:
    suites = tomllib.loads((Path(__file__).parent / "mistakes.toml").read_text())
    return [
        Mistake(suite, file, name, *row[:3], **dict(*row[3:]))
        for suite, files in suites.items()
        for file, rows in files.items()
        for name, row in rows.items()
    ]


def pattern(expression: str) -> re.Pattern[str]:
    """Match an expression with any white space, and with a comma before a bracket that closes."""
    tokens = []
    for token in re.findall(r"\w+|[^\w\s]", expression):
        if token in ")]}":
            tokens.append(rf"(?:,\s*)?\{token}")
        else:
            tokens.append(rf"\b{token}\b" if re.match(r"\w", token) else re.escape(token))
    return re.compile(r"\s*".join(tokens))


def python_functions(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yield where functions of that qualified name begin and end."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for part in name.split("."):
        children = [child for node in nodes for child in ast.iter_child_nodes(node)]
        nodes = [node for node in children if isinstance(node, DEFINITION) and node.name == part]
    lines = text.splitlines(keepends=True)
    for node in nodes:
        assert isinstance(node, DEFINITION)
        assert node.end_lineno is not None
        first, end = ("".join(lines[:line]) for line in (node.lineno - 1, node.end_lineno))
        yield len(first), len(end)


def native_functions(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yield where functions of C++ or Metal begin and end, which clang-format has indented."""
    for head in re.finditer(rf"^( {{0,2}})(?:\S.*)?\b{name}\(", text, re.MULTILINE):
        depth, at = 1, head.end()
        while depth:
            depth += (text[at] == "(") - (text[at] == ")")
            at += 1
        # It is in one line; or it ends with the line of a bracket below its first word.
        whole = rf"[\w\s]*[{{:](?:.*\}}$|(?s:.*?)^{head[1]}\}})"
        if body := re.compile(whole, re.MULTILINE).match(text, at):
            yield head.start(), body.end()
