"""Sections of METAL.md that a script writes: ``--check`` says whether one is as it should be."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "METAL.md"


@dataclass(frozen=True, slots=True)
class Section:
    """What stands between two marks."""

    name: str
    """As of the target in the Makefile that writes it."""

    @property
    def begin(self) -> str:
        """Before the first line."""
        return f"<!-- {self.name}: generated -->"

    @property
    def end(self) -> str:
        """Behind the last one."""
        return f"<!-- end of {self.name} -->"

    def main(self, paragraphs: Iterable[str], arguments: list[str]) -> int:
        """Write the section into the page; with --check say whether it is there as it should be."""
        section = "\n\n".join([self.begin, *paragraphs, self.end])
        text = PAGE.read_text()
        before, rest = text.split(self.begin)
        _, after = rest.split(self.end)
        wanted = before + section + after
        if arguments == ["--check"]:
            return 0 if text == wanted else 1
        PAGE.write_text(wanted)
        sys.stdout.write(section + "\n")
        return 0


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def three(values: Iterable[str]) -> str:
    """Of 1, 8 and 32 sequences."""
    return " / ".join(values)
