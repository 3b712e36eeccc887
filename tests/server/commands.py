"""The ``quire`` command as a person runs it: its exit codes, and what it says."""

from collections.abc import Callable

from typer.testing import Result

ENGINE, SETTINGS, MODEL = 1, 2, 3
Run = Callable[..., Result]


def one_sentence(result: Result, code: int) -> str:
    """What the command said about why it ended with that code."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("quire: ")]
    assert "Traceback" not in result.stderr
    return line
