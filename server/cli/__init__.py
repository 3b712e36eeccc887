"""The command line: commands such as serve, plan and doctor, and the assembly of a server."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from server.interrupts import end_at_interrupt


def main() -> None:
    """Run a command. Handle Ctrl-C first, because importing the commands takes time."""
    end_at_interrupt()
    with without_collection():
        from server.cli.commands import main as run_command
    run_command()


@contextmanager
def without_collection() -> Iterator[None]:
    """Import modules without garbage collection, which finds nothing and takes a fifth of the
    time. Later collections skip the modules."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
