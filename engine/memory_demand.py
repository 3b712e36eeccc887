"""How much memory serving a model takes. Serving and planning share it."""

from engine.config import EngineConfig
from engine.machine import MachineMemory
from engine.models.spec import ModelSpec
from engine.step_memory import activation_bytes, attention_scratch_bytes
from kvcache.layout import KVShape
from kvcache.memory_budget import MemoryDemand
from kvcache.substrates import Substrate


def memory_demand(
    spec: ModelSpec,
    config: EngineConfig,
    machine: MachineMemory,
    shape: KVShape,
    substrate: Substrate,
    itemsize: int,
) -> MemoryDemand:
    """Return what is needed beside the weights.

    machine: what the processor that computes may use. shape: of K and V. itemsize: bytes of a
    number that the model computes with.
    """
    activations = activation_bytes(spec, config, itemsize)
    attention = attention_scratch_bytes(spec, config, shape, substrate)
    return MemoryDemand(
        machine_bytes=machine.total_bytes,
        available_bytes=machine.available_bytes,
        headroom_bytes=machine.headroom_bytes(config.headroom_bytes),
        weights_bytes=0,
        activation_bytes=activations + attention,
        mlx_cache_bytes=config.mlx_cache_bytes,
        grammar_bytes=config.grammar_bytes,
        on_gpu=machine.on_gpu,
    )
