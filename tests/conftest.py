"""Fixtures that several folders share."""

import gc
import itertools
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

from tests.models import write_model

# One run is like another, however busy the machine.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """MLX draws the same in every run."""
    mx.random.seed(0)


@pytest.fixture(autouse=True)
def own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a test does to a substrate is remembered of no machine. The folder is made when it is
    needed."""
    unused = tmp_path_factory.getbasetemp() / f"caches-{next(NUMBERS)}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(unused))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint of two small layers."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def pytest_collection_finish() -> None:
    """What thousands of tests are made of lives to the end: the collector need not look at it after
    each of them."""
    gc.collect()
    gc.freeze()
