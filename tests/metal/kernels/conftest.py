"""The compiled kernels, and the figures that a run ends with."""

from collections.abc import Iterator

import pytest

from tests.metal.kernels.device import Device, library_path

FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "small: of the few that sanitizers and planted mistakes run")
    config.stash[FIGURES] = []


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash[FIGURES]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def device() -> Device:
    return Device(library_path())


@pytest.fixture
def ordered(device: Device) -> Iterator[Device]:
    """A device whose order a test changes."""
    yield device
    device.set_order(0)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are printed when all tests have run."""
    return request.config.stash[FIGURES]
