"""What a checkout of quire plans for Macs that are not here: JSON in, JSON out.

A file of its own, because the checkout may be an older one: it is run by that one's Python, and
imports what has been there for long.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

# Where older ones have it, too.
from server.cli.model_files import engine_config  # type: ignore[attr-defined]

import engine
from engine import build, substrate
from engine.config import EngineConfig
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.machine import MachineMemory
from kvcache.choice import SubstrateChoice
from kvcache.memory_budget import BudgetError, MemoryPlan
from kvcache.metal_device import MetalDevice
from kvcache.substrates import Substrate
from server.config import Config


def planned(case: dict[str, Any]) -> dict[str, Any]:
    """The plan with all settings at their defaults: K and V in tokens, the longest sequence, bytes
    beside K and V, and the warning; or the sentence that refuses.

    case: a model's folder, and bytes of the Mac's memory, of its GPU's working set, and of what is
    available.
    """
    checkpoint = read_checkpoint(Path(case["folder"]))
    machine = MachineMemory(case["memory_bytes"], case["available_bytes"])
    device = MetalDevice("", case["working_set_bytes"], max_buffer_bytes=1 << 62)
    choice = SubstrateChoice(Substrate.SPARSE, ())
    with (
        mock.patch.object(substrate, "machine_memory", return_value=machine),
        mock.patch.object(substrate, "metal_device", return_value=device),
    ):
        memory_of_gpu = substrate.memory_for(choice.substrate)
    config = engine_config(Config())
    try:
        memory = memory_plan(config, checkpoint, memory_of_gpu, choice)
    except BudgetError as error:
        return {"refused": str(error)}
    bytes_per_token = memory.layout.groups[0].bytes_per_token
    return {
        "tokens": memory.kv_budget_bytes // bytes_per_token,
        "context": memory.max_model_len,
        "sequences": memory.max_num_seqs,
        "state_bytes": getattr(memory, "state_bytes", 0),
        "cells": getattr(memory, "num_cells", 0),
        "bytes_per_token": bytes_per_token,
        "fixed_bytes": memory.demand.fixed_bytes,
        "warning": getattr(memory, "warning", None),
    }


def memory_plan(
    config: EngineConfig, checkpoint: Checkpoint, machine: MachineMemory, choice: SubstrateChoice
) -> MemoryPlan:
    """The sum, of models as well that a GPU does not run yet, where the checkout can tell it."""
    if hasattr(build, "plan_memory"):
        return build.plan_memory(config, checkpoint, machine, choice.substrate)
    return build.plan_engine(config, checkpoint, machine, choice).memory


if __name__ == "__main__":
    found = {"engine": engine.__file__, "plans": [planned(case) for case in json.load(sys.stdin)]}
    json.dump(found, sys.stdout)
