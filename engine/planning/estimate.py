"""Answers two questions about a model on a machine: what fits, and how fast may it be?"""

from dataclasses import dataclass, replace

from engine.build import EnginePlan, plan_engine
from engine.config import EngineConfig
from engine.models.checkpoint import Checkpoint
from engine.models.config import Quantization
from engine.planning.capacity import Allocation, Room, empty_machine
from engine.planning.cost import CostModel
from engine.planning.devices import Device
from engine.planning.memory import ModelShape, own_packing, weights_bytes
from engine.step.token_budget import alone_target_s
from kvcache.backends.choice import KVBackendChoice

FOUR_BITS = Quantization(4, 64)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The limits and the speed of a model on a machine, computed from the device's peak rates."""

    plan: EnginePlan
    cost: CostModel
    config: EngineConfig

    def chats(self, tokens: int) -> int:
        """Return how many sequences of ``tokens`` tokens run at once."""
        memory = self.plan.memory
        slots = memory.num_slots if memory.layout.shape.states else None
        own = Allocation("own", memory.layout)
        return min(memory.max_num_seqs, own.fit(Room(memory.kv_budget_bytes, slots), tokens))

    def decode_tokens_per_s(self, context: int) -> float:
        """Return the tokens per second of one sequence alone, after ``context`` tokens."""
        return 1 / self.cost.step_seconds([(context - 1, 1)])

    def first_token_s(self, prompt: int) -> float:
        """Return the time from a prompt's start to its first token, in steps of the target time."""
        limit = self.config.max_num_batched_tokens
        # A quarter and an eighth of it: so few tokens hardly attend to each other.
        more_s, few_s = (self.cost.step_seconds([(0, max(1, limit // n))]) for n in (4, 8))
        target_s = alone_target_s(self.config.step_time_target_ms / 1000, 2 * few_s - more_s)
        start, seconds = 0, 0.0
        while start < prompt:
            count = self.cost.prompt_tokens(target_s, limit, start)
            count = min(count, prompt - start)
            seconds += self.cost.step_seconds([(start, count)])
            start += count
        return seconds


def estimate(plan: EnginePlan, device: Device, config: EngineConfig) -> Estimate:
    weights, kv = plan.memory.demand.weights_bytes, plan.memory.layout.shape
    return Estimate(plan, CostModel.of(device, plan.checkpoint.spec, weights, kv), config)


def plan_elsewhere(config: EngineConfig, checkpoint: Checkpoint, device: Device) -> EnginePlan:
    """Plan a model on a machine on which nothing else runs. Raises BudgetError or LayoutError."""
    machine, backend = empty_machine(device)
    return plan_engine(config, checkpoint, machine, KVBackendChoice(backend, ()))


def in_four_bits(shape: ModelShape, checkpoint: Checkpoint, *, on_gpu: bool) -> Checkpoint:
    """Return the checkpoint that the model would have in MLX's 4 bits."""
    size = weights_bytes(shape, own_packing(FOUR_BITS, on_gpu=on_gpu))
    return replace(checkpoint, stored_bytes=size, packed_bytes=size)
