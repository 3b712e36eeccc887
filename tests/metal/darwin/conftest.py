"""Where a check's Mac keeps its figures, and what is said behind all checks."""

from pathlib import Path

import pytest

from tests.metal.darwin.product import Product


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    """A folder for those of one Mac."""
    return tmp_path / "mac"


@pytest.fixture(scope="session")
def product() -> Product:
    """The checkout that is asked."""
    return Product.chosen()


@pytest.fixture(scope="session")
def model() -> Path:
    """One that answers in sentences."""
    return Path(__file__).parents[3] / "configs" / "demo" / "model"
