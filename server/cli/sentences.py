"""Writes the text of commands: an error as one sentence with an exit code, and tables."""

from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from server.catalogue.names import printable
from server.config import StartError

HEAD_OF_LINE = "quire"
# Limit of an error's text, which may quote a file of any length.
MAX_SENTENCE_CHARS = 4000
NOTHING_CAN_SERVE = 1
# If this module does not match MLX, its ImportError tells users so in one sentence.
EXTENSION = "metal_ext"


def say(sentence: str) -> None:
    """Print a sentence on standard error: standard output is only for a command's result."""
    typer.echo(f"{HEAD_OF_LINE}: {printable(sentence, MAX_SENTENCE_CHARS)}", err=True)


class OneSentence(TyperGroup):
    """Commands that end on an error with one sentence and the error's exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except StartError as error:
            say(str(error))
            raise typer.Exit(error.exit_code) from error
        except ImportError as error:
            if error.name != EXTENSION:
                raise
            say(str(error))
            raise typer.Exit(NOTHING_CAN_SERVE) from error


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Yield a table's lines: the first column is aligned left, all other columns right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield (indent + "  ".join(cells)).rstrip()


def tokens_label(tokens: int) -> str:
    """Format a number of tokens, such as 2k for 2048."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
