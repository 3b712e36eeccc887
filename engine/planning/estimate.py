"""Answers two questions about a model on a machine: what fits, and how fast may it be?"""

from dataclasses import dataclass, replace
from pathlib import Path

from engine.build import EnginePlan, plan_engine
from engine.config import EngineConfig
from engine.models.checkpoint import Checkpoint, promised_checkpoint
from engine.models.config import Quantization
from engine.planning.capacity import Allocation, Room, empty_machine
from engine.planning.devices import CostModel, Device
from engine.planning.memory import BF16, ModelShape, Packing, own_packing, weights_bytes
from kvcache.kv_backends import KVBackendChoice

FOUR_BITS = Quantization(4, 64)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The limits and the speed of a model on a machine, computed from the device's peak rates."""

    plan: EnginePlan
    cost: CostModel
    step_tokens: int
    """The largest number of prompt tokens that one step computes."""

    def chats(self, tokens: int) -> int:
        """Return how many sequences of ``tokens`` tokens run at once."""
        memory, slot = self.plan.memory, self.plan.memory.layout.shape.slot
        room = Room(memory.kv_budget_bytes, memory.num_slots, slot.slot_bytes if slot else 0)
        return min(memory.max_num_seqs, Allocation("own", memory.layout).fit(room, tokens))

    def decode_tokens_per_s(self, context: int) -> float:
        """Return the highest rate of tokens for one sequence alone, after ``context`` tokens."""
        return 1 / self.cost.step_seconds([(context - 1, 1)])

    def first_token_s(self, prompt: int) -> float:
        """Return the least time from a prompt's start to its first token."""
        starts = range(0, prompt, self.step_tokens)
        return sum(
            self.cost.step_seconds([(at, min(self.step_tokens, prompt - at))]) for at in starts
        )


def estimate(shape: ModelShape, plan: EnginePlan, device: Device, config: EngineConfig) -> Estimate:
    stored, dtype = shape.quantization, plan.checkpoint.dtype
    packing = Packing(dtype, 32 if dtype == "F32" else 16)
    if stored is not None:
        packing = own_packing(stored, on_gpu=device.on_gpu)
    cost = CostModel.of(shape, device, packing)
    return Estimate(plan, cost, config.max_num_batched_tokens)


def plan_elsewhere(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: Device,
    memory_bytes: int,
    working_set_bytes: int | None = None,
) -> EnginePlan:
    """Plan a model on a machine on which nothing else runs. ``working_set_bytes`` is the memory
    that a GPU may use; None means the device's default. Raises BudgetError or LayoutError."""
    machine, backend = empty_machine(device, memory_bytes, working_set_bytes)
    return plan_engine(config, checkpoint, machine, KVBackendChoice(backend, ()))


def checkpoint_without_weights(folder: Path, shape: ModelShape) -> Checkpoint:
    """Predict the checkpoint of a folder that has only ``config.json``."""
    stored = shape.quantization
    packing = BF16 if stored is None else own_packing(stored, on_gpu=True)
    return promised_checkpoint(folder, weights_bytes(shape, packing))


def in_four_bits(
    shape: ModelShape, checkpoint: Checkpoint, *, on_gpu: bool
) -> tuple[ModelShape, Checkpoint]:
    """Return the shape and the checkpoint that the model would have in MLX's 4 bits."""
    size = weights_bytes(shape, own_packing(FOUR_BITS, on_gpu=on_gpu))
    packed = replace(checkpoint, stored_bytes=size, packed_bytes=size)
    return replace(shape, quantization=FOUR_BITS), packed
