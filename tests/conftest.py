"""Fixtures that several folders share."""

from pathlib import Path

import pytest

from tests.models import write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of two small layers."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")
