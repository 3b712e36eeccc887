"""A GPU with few addresses serves the largest models, and never refuses a buffer.

The plan, the cache and the pool of buffers are the product's; the device counts addresses."""

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.models.checkpoint import promised_checkpoint
from engine.planning.devices import find_device
from engine.planning.estimate import plan_elsewhere
from kvcache.backends.backend import Releases
from kvcache.budget import ADDRESS_PARTS, CacheLimits
from kvcache.manager import KVCacheManager
from server.cli.suggestions import configs
from server.config import Config, engine_config
from tests.kvcache.managers import complete_steps, epochs_of, grow, join
from tests.kvcache.strict_memory import StrictMemory
from tests.kvcache.strict_states import StrictStates

ADDRESSES = {"M3 Ultra": 1 << 42, "M1 Ultra": 1 << 39}
CONVERSATIONS = 500
PROMPT = 70
CONFIG = engine_config(Config())
MODELS = configs()
MODELS["qwen3:32b"] = MODELS["qwen3:14b"] | {"num_hidden_layers": 64, "num_attention_heads": 64}
MODELS["qwen3-coder-next"] = MODELS["qwen3.6:35b"] | {"num_hidden_layers": 48, "num_experts": 512}
LARGEST = (  # of each family
    "qwen3:32b", "qwen3-coder:30b", "qwen3.6:27b", "qwen3.6:35b", "qwen3-coder-next", "llama3.1:8b",
)  # fmt: skip


@dataclass(slots=True)
class Addresses(StrictMemory):
    """Memory of a device that refuses buffers beyond the addresses that it has left."""

    left: int = 0

    def add_buffer(self) -> bool:
        self.left -= self.group.blocks_per_buffer * self.group.block_bytes
        return self.left >= 0 and StrictMemory.add_buffer(self)


@pytest.mark.parametrize("model", [*LARGEST, "qwen3.5:0.8b"])
def test_500_conversations_come_and_go_on_an_m1(model: str, tmp_path: Path) -> None:
    for name, addresses in ADDRESSES.items():
        chip = find_device(name)
        assert chip is not None
        (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
        checkpoint = promised_checkpoint(tmp_path)
        memory = plan_elsewhere(CONFIG, checkpoint, chip).memory
        buffer_bytes = memory.layout.blocks_for(memory.max_model_len) * memory.layout.block_bytes
        assert memory.max_buffers * buffer_bytes <= addresses // ADDRESS_PARTS
        says = f"leaves {memory.max_num_seqs} sequences of {memory.max_model_len} tokens"
        is_short = memory.max_model_len < MODELS[model]["max_position_embeddings"]
        assert (says in "\n".join(memory.lines())) == is_short
        assert is_short == (name == "M1 Ultra" and model != "qwen3.5:0.8b")
    (group,) = memory.layout.groups
    taken = memory.demand.fixed_bytes + memory.kv_budget_bytes + memory.state_bytes
    device = Addresses(
        group, releases=Releases.NOTHING, maps_while_running=False,
        left=ADDRESSES["M1 Ultra"] - taken,
    )  # fmt: skip
    limits = CacheLimits(memory.kv_budget_bytes, memory.max_num_seqs, memory.max_buffers, CONFIG)
    states = StrictStates(memory.num_slots) if memory.num_slots else None
    kv = KVCacheManager(memory.layout, [device], limits, identity=b"test", states=states)
    running: deque[int] = deque()
    for number in range(1, CONVERSATIONS + 1):
        if len(running) == memory.max_num_seqs:
            kv.close(running.popleft())
            complete_steps(kv)
        assert join(kv, number, PROMPT, final=memory.max_model_len)
        running.append(number)
        grow(kv, number, 0, PROMPT)
        device.completed_epoch, _ = epochs_of(kv)
        complete_steps(kv)
    assert device.left >= 0, "no buffer was refused"
    assert device.buffers == memory.max_num_seqs + 1
