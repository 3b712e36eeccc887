"""Fixtures for tests that run on a product whose own tests have none of that name."""

import os
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from tests.clients.servers import QUIRE

LIMIT_S = 30.0
"""For a command that must end by itself."""


@pytest.fixture
def own_log() -> None:
    """The log of this process is not used."""


@pytest.fixture
def quire(own_log: None) -> object:
    """Runs the command as a process: that needs nothing of its inside."""

    def run(*arguments: str | Path) -> Result:
        # Of this process's hub, which a test may have changed.
        hub = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_CACHE": constants.HF_HUB_CACHE}
        done = subprocess.run(
            [QUIRE, *map(str, arguments)],
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
            env={"QUIRE_SERVER__PORT": "0"} | os.environ | hub,
        )
        said = done.stdout + done.stderr
        return Result(CliRunner(), done.stdout, done.stderr, said, None, done.returncode, None)

    return run
