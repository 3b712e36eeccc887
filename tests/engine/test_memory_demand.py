from dataclasses import replace
from pathlib import Path

from engine.machine import MachineMemory
from engine.memory_demand import memory_demand
from engine.planning.shape import read_shape
from engine.step_memory import activation_bytes, attention_scratch_bytes
from kvcache.substrates import Substrate
from tests.engines import CONFIG, SHAPE
from tests.models import TINY, write_config

GIB = 1024**3


def test_a_demand_is_all_but_the_weights(tmp_path: Path) -> None:
    spec = read_shape(write_config(tmp_path, TINY)).spec
    config = replace(CONFIG, headroom_bytes=None)
    found = memory_demand(spec, config, MachineMemory(10 * GIB, 9 * GIB), SHAPE, Substrate.POSIX, 4)
    assert (found.machine_bytes, found.available_bytes) == (10 * GIB, 9 * GIB)
    assert (found.headroom_bytes, found.usable_bytes) == (2 * GIB, 8 * GIB)
    attention = attention_scratch_bytes(spec, config, SHAPE, Substrate.POSIX)
    assert found.activation_bytes == activation_bytes(spec, config, 4) + attention
    assert found.fixed_bytes == found.activation_bytes + config.mlx_cache_bytes
