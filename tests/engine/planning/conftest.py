import pytest

from engine.planning.memory import ModelShape, read_shape
from tests.models import QWEN3_4B, write_config


@pytest.fixture(scope="session")
def qwen3_4b(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    """Qwen3-4B, as its config.json has it."""
    return read_shape(write_config(tmp_path_factory.mktemp("models") / "qwen3-4b", QWEN3_4B))
