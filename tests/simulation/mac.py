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
from kvcache.backends.choice import KVBackend, KVBackendChoice
from kvcache.budget import MemoryPlan
from server.config import Config, engine_config
from tests.kvcache.strict_memory import Manners
from tests.models import QWEN3_8B, write_config
from tests.simulation.faults import SimulationError
from tests.simulation.simulator import Simulation
from tests.simulation.world import VOCAB, World

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
    return World(
        memory.layout,
        memory.max_model_len,
        heaps=memory.kv_budget_bytes // memory.layout.heap_bytes,
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=CONFIG.max_num_batched_tokens,
        min_budget_tokens=16,
        overlap=True,
        shares_prefixes=True,
        max_sharers=CONFIG.max_sharers,
        free_slack_bytes=CONFIG.free_slack_bytes,
        idle_release_s=CONFIG.idle_release_s,
        prefix_keep_s=CONFIG.prefix_keep_s,
        maps_while_running=False,
        manners=Manners.NOTHING,
        pressure=PressureLevel.WARNING,
        step_s=0.02,
        token_s=0.002,
        longest_lag=1,
        arrivals=tuple(60.0 * m + 0.01 * p for m in range(MINUTES) for p in range(PEOPLE)),
        longest_prompt=2 * SYSTEM_TOKENS,
        longest_answer=40,
        system_prompts=(tuple(n % VOCAB for n in range(SYSTEM_TOKENS)),),
        turn_rate=0.95,
        stop_id_rate=0.5,
        max_backlog=64,
    )


def mac_hour(seed: int = 0) -> Counter[str]:
    """Return the counts of an hour. Raises BudgetError where nothing starts, SeedFailedError for a
    wrong token or a broken rule, and SimulationError where people wait for one another or lose a
    prefix."""
    simulation = Simulation(seed, world=mac_world(mac_plan()), trace_lines=None)
    counts = simulation.run()
    running = max(len(line.plan.entries) for line in simulation.trace if line.plan is not None)
    counts["most at once"] = running
    if running < PEOPLE:
        raise SimulationError(f"{running} of {PEOPLE} were answered at once")
    if counts["prefix misses: evicted"]:
        raise SimulationError(f"{counts['prefix misses: evicted']} prompts lost what was cached")
    return counts
