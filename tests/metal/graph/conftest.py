"""What every check of this folder ends with, and what is said behind all of them."""

import sys
from collections.abc import Iterator

import pytest

REPORT = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def nothing_was_done_wrong() -> Iterator[None]:
    """No rule of Metal's or of MLX's was broken."""
    from tests.metal.graph import stage

    yield
    assert stage.take_mistakes() == []


@pytest.fixture
def report(pytestconfig: pytest.Config) -> list[str]:
    """Lines for the end of the run."""
    return pytestconfig.stash.setdefault(REPORT, [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Every planted mistake and how it showed, and what was run in all."""
    for line in config.stash.get(REPORT, []):
        terminalreporter.write_line(line)
    standin = sys.modules.get("tests.metal.graph._standin")
    if standin is not None:
        done = standin.counts()
        passed, failed = (len(terminalreporter.stats.get(s, [])) for s in ("passed", "failed"))
        terminalreporter.write_line(
            f"metal-graph: {passed} checks passed, {failed} failed; "
            f"{done['operations']} operations, "
            f"{done['commands']} commands in {done['encoders']} encoders and "
            f"{done['command_buffers']} command buffers, {done['barriers']} barriers, "
            f"{done['waits']} waits for fences"
        )
