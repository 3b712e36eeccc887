"""A GPU with few addresses serves its largest models, and never refuses a buffer.

The plan, the cache and the pool of buffers are the product's; the device counts addresses."""

from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.models.checkpoint import promised_checkpoint
from engine.models.families import FAMILIES
from engine.planning.devices import DEVICES, Device, find_device
from engine.planning.estimate import plan_elsewhere
from kvcache.backend import Charge, Releases
from kvcache.kv_backends import MetalDevice
from kvcache.manager import KVCacheManager
from kvcache.memory_budget import ADDRESS_PARTS, CacheLimits, MemoryPlan
from server.config import Config, engine_config
from tests.families import PUBLISHED, PUBLISHED_DELTA, QWEN3_NEXT, Published
from tests.kvcache.managers import complete_steps, epochs_of, grow, join
from tests.kvcache.strict_memory import StrictMemory
from tests.kvcache.strict_states import StrictStates
from tests.models import ModelSpec

M1_ADDRESSES = 1 << 39
CONVERSATIONS = 500
PROMPT = 70
CONFIG = engine_config(Config())
MIXTURE = PUBLISHED["Qwen3-30B-A3B"]
NEXT = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
# By model_type, the largest model of each family: Qwen3-32B, Qwen3-Coder-30B-A3B, Qwen3.8-27B,
# Qwen3.6-35B-A3B, Qwen3-Coder-Next, Qwen2.5-Coder-32B, Llama-3.1-8B.
LARGEST = {
    "qwen3": Published(ModelSpec(64, 5120, 64, 8, 128, 25600, 151936, 40960, False)),
    "qwen3_moe": replace(MIXTURE, spec=replace(MIXTURE.spec, max_position_embeddings=262144)),
    "qwen3_5": PUBLISHED["Qwen3.6-27B"],
    "qwen3_5_moe": PUBLISHED["Qwen3.6-35B-A3B"],
    "qwen3_next": Published(
        ModelSpec(48, 2048, 16, 2, 256, 5120, 151936, 262144, False),
        QWEN3_NEXT | PUBLISHED_DELTA | NEXT,
    ),
    "qwen2": Published(
        ModelSpec(64, 5120, 40, 8, 128, 27648, 152064, 32768, False), {"model_type": "qwen2"}
    ),
    "llama": Published(
        ModelSpec(32, 4096, 32, 8, 128, 14336, 128256, 131072, False), {"model_type": "llama"}
    ),
}


@dataclass(slots=True)
class Addresses(StrictMemory):
    """Memory of a device that refuses buffers beyond the addresses that it has left."""

    left: int = 0
    refusals: int = 0

    def add_buffer(self) -> bool:
        self.left -= self.group.blocks_per_buffer * self.group.block_bytes
        self.refusals += self.left < 0
        return self.left >= 0 and StrictMemory.add_buffer(self)


def planned(folder: Path, family: str, name: str) -> MemoryPlan:
    """The plan of a family's model in 4 bits on a chip with all the memory that it may have."""
    chip = find_device(name)
    assert chip is not None
    packed = {"quantization": {"group_size": 64, "bits": 4}}
    path = LARGEST[family].write(folder / "model", **packed)
    checkpoint = promised_checkpoint(path)
    return plan_elsewhere(CONFIG, checkpoint, chip).memory


@pytest.mark.parametrize("family", LARGEST)
def test_500_conversations_come_and_go_on_an_m1(family: str, tmp_path: Path) -> None:
    memory = planned(tmp_path, family, "M1 Ultra")
    taken = memory.demand.fixed_bytes + memory.kv_budget_bytes + memory.state_bytes
    (group,) = memory.layout.groups
    device = Addresses(
        group, releases=Releases.NOTHING, charge=Charge.HEAPS, maps_while_running=False,
        left=M1_ADDRESSES - taken,
    )  # fmt: skip
    limits = CacheLimits(memory.kv_budget_bytes, memory.max_num_seqs, CONFIG, memory.max_buffers)
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
    assert device.refusals == 0
    assert device.buffers == memory.max_num_seqs + 1


@pytest.mark.parametrize("family", LARGEST)
def test_a_plan_says_where_addresses_shorten_the_context(family: str, tmp_path: Path) -> None:
    m1, m3 = (planned(tmp_path, family, name) for name in ("M1 Ultra", "M3 Ultra"))
    for memory, bits in ((m1, 39), (m3, 42)):
        buffer_bytes = memory.layout.blocks_for(memory.max_model_len) * memory.layout.block_bytes
        assert memory.max_buffers * buffer_bytes <= (1 << bits) // ADDRESS_PARTS
        assert memory.max_num_seqs + 1 <= memory.max_buffers <= 2 * memory.max_num_seqs
    knows = LARGEST[family].spec.max_position_embeddings
    assert (m3.max_model_len, m3.note) == (knows, None)
    said = f"leaves {m1.max_num_seqs} sequences of {m1.max_model_len} tokens"
    assert (said in "\n".join(m1.lines())) == (m1.max_model_len < knows)


def test_every_family_is_here() -> None:
    assert LARGEST.keys() == FAMILIES.keys()


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_chips_have_more_addresses_from_the_m3_on(device: Device) -> None:
    bits = 39 if device.name[1] in "12" else 42
    assert device.address_bytes == (1 << bits if device.on_gpu else None)


@pytest.mark.parametrize(
    ("families", "bits"),
    [("", 39), ("apple5", 39), ("apple7 metal3", 39), ("apple7 apple8 metal4", 39),
     ("apple8 apple9", 42), ("apple9 apple10", 42)],
)  # fmt: skip
def test_a_device_has_the_addresses_of_its_family(families: str, bits: int) -> None:
    device = MetalDevice("", 1, 1, {"families": families.split()})
    assert device.address_bytes == 1 << bits
