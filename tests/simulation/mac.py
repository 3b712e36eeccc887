"""An hour of a Mac with 16 GiB that is in use: its system warns that it is short of memory.

The budget is what the production plan makes of the Mac's figures; heaps are kept, as on its GPU.
Four people talk to the model at once, every minute, and most go on with what was said before.
"""

import tempfile
from collections import Counter
from pathlib import Path

from engine.build import plan_engine
from engine.machine import MachineMemory, PressureLevel, gpu_memory
from engine.models.checkpoint import promised_checkpoint
from engine.planning.memory import Q4, read_shape, weights_bytes
from engine.types import EngineLimits, PrefixSalt
from kvcache.kv_backends import KVBackend, KVBackendChoice
from kvcache.memory_budget import MemoryPlan
from server.config import Config, engine_config
from tests.kvcache.strict_memory import Manners
from tests.models import QWEN3_8B, write_config
from tests.simulation.faults import SimulationError
from tests.simulation.runner import DeviceTraits
from tests.simulation.simulator import Simulation
from tests.simulation.world import VOCAB, EngineTraits, MemoryTraits, TrafficTraits, World

GIB = 1024**3
# What macOS recommends its GPU of 16 GiB, and what vm_stat's free and inactive pages leave when a
# browser is open.
MEMORY_BYTES, WORKING_SET_BYTES, AVAILABLE_BYTES = 16 * GIB, 16 * GIB * 2 // 3, 4 * GIB
PEOPLE = 4
MINUTES = 60
SYSTEM_TOKENS = 600
CONFIG = engine_config(Config())


def mac_plan() -> MemoryPlan:
    """Plan Qwen3-8B in 4 bits with all settings at their defaults. Raises BudgetError."""
    with tempfile.TemporaryDirectory() as name:
        quantization = {"group_size": 64, "bits": 4}
        folder = write_config(Path(name), QWEN3_8B, quantization=quantization)
        checkpoint = promised_checkpoint(folder, weights_bytes(read_shape(folder), Q4))
    machine = gpu_memory(MachineMemory(MEMORY_BYTES, AVAILABLE_BYTES), WORKING_SET_BYTES)
    return plan_engine(CONFIG, checkpoint, machine, KVBackendChoice(KVBackend.SPARSE, ())).memory


def mac_world(memory: MemoryPlan) -> World:
    """Return a friendly device under a system that warns from the first moment."""
    engine = EngineTraits(
        layout=memory.layout,
        budget_bytes=memory.kv_budget_bytes,
        free_slack_bytes=CONFIG.free_slack_bytes,
        limits=EngineLimits(memory.max_model_len, memory.max_num_seqs, VOCAB),
        max_sharers=CONFIG.max_sharers,
        shares_prefixes=True,
        max_num_batched_tokens=CONFIG.max_num_batched_tokens,
        min_budget_tokens=16,
        step_target_s=0.1,
        idle_release_s=CONFIG.idle_release_s,
        prefix_keep_s=CONFIG.prefix_keep_s,
    )
    traffic = TrafficTraits(
        arrivals=tuple(60.0 * m + 0.01 * p for m in range(MINUTES) for p in range(PEOPLE)),
        longest_prompt=2 * SYSTEM_TOKENS,
        longest_answer=40,
        system_prompts=(tuple(n % VOCAB for n in range(SYSTEM_TOKENS)),),
        salts=(PrefixSalt(),),
        abort_rate=0.0,
        slow_reader_rate=0.0,
        fork_rate=0.0,
        turn_rate=0.95,
        priority_rate=0.0,
        max_backlog=64,
        late_delivery_rate=0.0,
        fatal_faults=False,
        scoring_rate=0.0,
        pooling_rate=0.0,
        rule_rate=0.0,
    )
    return World(
        engine,
        MemoryTraits(0.0, 0.0, 1, 0, 0.0, Manners.NOTHING, True, None, None, False),
        DeviceTraits(VOCAB, 1, 0.0, 0.0, step_s=0.02, token_s=0.002),
        traffic,
        pressure_rate=0.0,
        overlap=True,
        pressure=PressureLevel.WARNING,
    )


def mac_hour(seed: int = 0) -> Counter[str]:
    """Return the counts of an hour. Raises BudgetError where nothing starts, SeedFailedError for a
    wrong token or a broken rule, and SimulationError where people wait for one another or lose a
    prefix."""
    simulation = Simulation(seed, None, mac_world(mac_plan()))
    counts = simulation.run()
    running = max(len(line.plan.entries) for line in simulation.trace if line.plan is not None)
    counts["most at once"] = running
    if running < PEOPLE:
        raise SimulationError(f"{running} of {PEOPLE} were answered at once")
    if counts["prefix misses: evicted"]:
        raise SimulationError(f"{counts['prefix misses: evicted']} prompts lost what was cached")
    return counts
