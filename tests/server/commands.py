"""The ``quire`` command as a person runs it: its exit codes, and what it says."""

from collections.abc import Callable

from typer.testing import Result

from server.config import MIB, Tables

ENGINE, SETTINGS, MODEL = 1, 2, 3
Run = Callable[..., Result]
# Settings of a server that needs little.
SMALL: Tables = {
    "server": {"port": 0},
    "engine": {"max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 64},
    "cache": {"kv_budget": 8 * MIB, "heap_size": MIB, "free_slack": MIB, "page_size": 4096},
}


def one_sentence(result: Result, code: int) -> str:
    """What the command said about why it ended with that code."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    said = [line for line in result.stderr.splitlines() if line.startswith("quire: ")]
    (line,) = [line for line in said if not line.startswith("quire: loading")]
    assert "Traceback" not in result.stderr
    return line
