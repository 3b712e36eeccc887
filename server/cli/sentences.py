"""How a command ends that cannot go on: with one sentence, and its exit code."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from server.catalogue.names import printable
from server.config import StartError

HEAD_OF_LINE = "quire"
# What is wrong with a file may repeat what others have written into it.
MAX_SENTENCE_CHARS = 4000
NOTHING_CAN_SERVE = 1
# Whose ImportError is a sentence about it and MLX, and no defect of quire's.
EXTENSION = "metal_ext"


def say(sentence: str) -> None:
    """Write a sentence where nobody takes it for a command's output."""
    typer.echo(f"{HEAD_OF_LINE}: {printable(sentence, MAX_SENTENCE_CHARS)}", err=True)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Say what is wrong, and end with its exit code."""
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
