"""The text that commands write: errors as one sentence with its exit code, and tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from server.catalogue.names import printable
from server.config import StartError

HEAD_OF_LINE = "quire"
# An error may repeat a part of a file that others have written.
MAX_SENTENCE_CHARS = 4000
NOTHING_CAN_SERVE = 1
# Its ImportError is a sentence about it and MLX, and no defect of quire's.
EXTENSION = "metal_ext"


def say(sentence: str) -> None:
    """Write a sentence to standard error, apart from a command's output."""
    typer.echo(f"{HEAD_OF_LINE}: {printable(sentence, MAX_SENTENCE_CHARS)}", err=True)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Write an error as a sentence, and end with its exit code."""
    try:
        yield
    except StartError as error:
        say(str(error))
        raise typer.Exit(error.exit_code) from error
    except ImportError as error:
        if error.name != EXTENSION:
            raise
        say(str(error))
        raise typer.Exit(NOTHING_CAN_SERVE) from error


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> Iterator[str]:
    """Yield the lines of a table; its first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield (indent + "  ".join(cells)).rstrip()
