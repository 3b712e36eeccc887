"""Where a check's Mac keeps its figures, and what is said behind all checks."""

from pathlib import Path

import pytest

from tests.metal.darwin.macs import MACS

REPORT = pytest.StashKey[list[str]]()


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    """A folder for those of one Mac."""
    return tmp_path / "mac"


@pytest.fixture(scope="session")
def model() -> Path:
    """One that answers in sentences."""
    return Path(__file__).parents[3] / "configs" / "demo" / "model"


@pytest.fixture
def report(pytestconfig: pytest.Config) -> list[str]:
    """Lines for the end of the run."""
    return pytestconfig.stash.setdefault(REPORT, [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What was found, in a line."""
    for line in config.stash.get(REPORT, []):
        terminalreporter.write_line(line)
    folder = Path(__file__).parent
    if not any(folder in Path(name).resolve().parents for name in config.args):
        return  # it is read where tests of all of metal are looked for, too
    passed, failed = (len(terminalreporter.stats.get(s, [])) for s in ("passed", "failed"))
    terminalreporter.write_line(
        f"metal-darwin: {passed} checks passed, {failed} failed; Macs of "
        f"{', '.join(str(mac.memory_gib) for mac in MACS)} GB, macOS 14 and 26"
    )
