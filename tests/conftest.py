"""Fixtures that several folders share."""

import gc
from pathlib import Path

import pytest

from tests.models import write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of two small layers."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def pytest_collection_finish() -> None:
    """What thousands of tests are made of lives to the end: the collector need not look at it after
    each of them."""
    gc.collect()
    gc.freeze()
