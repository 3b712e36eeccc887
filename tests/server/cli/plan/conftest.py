from dataclasses import replace
from pathlib import Path

import pytest

from engine.planning.capacity import CapacityReport, plan_capacity
from engine.planning.memory import ModelShape, read_shape
from server.cli.plan import Target
from server.config import Config, engine_config
from tests.models import QWEN3_4B, write_config


@pytest.fixture(scope="session")
def qwen3_4b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of Qwen3-4B and no weights."""
    return write_config(tmp_path_factory.mktemp("models") / "Qwen3-4B", QWEN3_4B)


def plan(shape: ModelShape, memory: str, context: int = 4096) -> CapacityReport:
    device = Target.of("M4 Pro", memory).device
    return plan_capacity(shape, device, context, engine_config(Config()))


@pytest.fixture(scope="package")
def report(qwen3_4b: Path) -> CapacityReport:
    """Qwen3-4B on an M4 Pro with 18 GiB, for 4096 tokens."""
    return plan(read_shape(qwen3_4b), "18GiB")


@pytest.fixture(scope="package")
def hopeless(qwen3_4b: Path) -> CapacityReport:
    """The same with 2 GiB, of which nothing is left; and a model that knows long contexts."""
    shape = read_shape(qwen3_4b)
    shape = replace(shape, spec=replace(shape.spec, max_position_embeddings=262144))
    return plan(shape, "2GiB")
