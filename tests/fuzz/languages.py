"""Texts that grow with a number n, and the tables of productions that they are made of.

In a template ``«a»`` stands for n times ``a``; within it ``§`` is the index of the repetition, from
0, and ``¶`` the one after it. ``№`` is n, and so is ``§`` elsewhere. ``¤`` is a slot for another
template. ``�`` is a byte that makes no UTF-8.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

SLOT = "¤"
MARKS = re.compile("[§¶]")
SMALL = (2, 3, 8, 32)
"""Sizes of a text that is repeated itself."""
Items = tuple[str, ...]


def grown(template: str, n: int) -> bytes:
    """The template's text of size n."""
    parts = re.split("[«»]", template)
    assert len(parts) % 2, "every repetition is closed"
    parts[::2] = [re.sub("[§№]", str(n), part) for part in parts[::2]]
    parts[1::2] = [_many(unit.replace("№", str(n)), n) for unit in parts[1::2]]
    return "".join(parts).encode().replace("�".encode(), b"\xff")


def _many(unit: str, n: int) -> str:
    if not (marks := MARKS.findall(unit)):
        return unit * n
    form = MARKS.sub("%d", unit.replace("%", "%%"))
    return form * n % tuple(index + (mark == "¶") for index in range(n) for mark in marks)


def put(frame: str, inner: str) -> str:
    """The frame with the inner template in its slot."""
    return frame.replace(SLOT, inner)


@dataclass(frozen=True, slots=True)
class Language:
    """A grammar: its expressions, what may stand between and around them, and other whole texts."""

    name: str
    frame: str
    """A whole text around one expression."""
    between: Items
    atoms: Items
    wraps: Items
    whole: Items

    def productions(self) -> Iterator[tuple[str, str]]:
        """Each one side by side, deep, and without an end; with names of their own."""
        for atom, between in product(self.atoms, self.between):
            yield f"side {atom}{between}", put(self.frame, f"«{atom}{between}»{atom}")
        for wrap in self.wraps:
            before, after = wrap.split(SLOT)
            yield f"deep {wrap}", put(self.frame, f"«{before}»{self.atoms[0]}«{after}»")
            yield f"open {before}", put(self.frame, f"«{before}»")
            yield f"close {after}", put(self.frame, f"«{after}»")
        yield from ((f"whole {text}", text) for text in self.whole)

    def mixed(self, draw: Random) -> str:
        """A template of some productions, side by side or one in another."""
        (a, b), s = draw.sample(self.atoms, 2), draw.choice(self.between)
        (o, c), (p, d) = (wrap.split(SLOT) for wrap in draw.sample(self.wraps, 2))
        lump = grown(f"«{o}»{a}«{c}»", draw.choice(SMALL)).decode()
        row = grown(f"«{b}{s}»{a}", draw.choice(SMALL)).decode()
        expressions = (
            *(f"«{a}{s}{b}{s}»{a}", f"«{o}{p}»{a}«{d}{c}»", f"«{lump}{s}»{b}", f"«{o}»{row}«{c}»"),
            *(f"«{o}»«{b}{s}»{a}«{c}»", f"«{o}{b}{s}»{a}«{c}»", f"«{b}{s}»{o}«{p}»{a}«{d}»{c}"),
            f"{o}«{p}{row}{d}{s}»{a}{c}",
        )
        return put(self.frame, draw.choice(expressions))


def _items(cells: list[Any]) -> Items:
    """What a row of the table says."""
    found: list[str] = []
    for cell in cells:
        patterns, values = cell if isinstance(cell, list) else (cell, "@")
        texts = [re.split(r" {2,}|\n *", text) for text in (patterns, values)]
        found += (pattern.replace("@", value) for pattern, value in product(*texts))
    return tuple(dict.fromkeys(text.replace("⏎", "\n") for text in found))


def read() -> dict[str, Language]:
    """All languages of languages.toml."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {
        name: Language(
            name,
            table["frame"],
            tuple(table["between"]),
            *(_items(table[row]) for row in ("atoms", "wraps", "whole")),
        )
        for name, table in tables.items()
    }
