"""Chooses a substrate (a way to map memory for K and V), and plans an engine in its memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import metal_ext
from engine.build import EnginePlan, kv_shape, plan_engine
from engine.config import EngineConfig
from engine.machine import MachineMemory, gpu_memory, machine_memory
from engine.models.checkpoint import Checkpoint
from kvcache.fault_memory import FaultMemory
from kvcache.layout import METAL_PAGES, choose_page
from kvcache.memory_budget import BudgetError, gib
from kvcache.native_backends import system_file_limit
from kvcache.selftest.machine import this_machine, wheel_warning
from kvcache.selftest.run import CacheSize, SelfTest, has_passed, run_selftest
from kvcache.substrates import (
    NO_DEVICE,
    NO_METAL,
    MetalDevice,
    Substrate,
    SubstrateChoice,
    choose_mapping,
    choose_release,
    choose_substrate,
)


def plan_for_this_machine(
    config: EngineConfig, checkpoint: Checkpoint, budget_bytes: int | None = None
) -> EnginePlan:
    """Choose the substrate, and plan the model and its cache in the substrate's memory.

    budget_bytes: all memory that the engine may use, even if other programs use it now; None for
    the machine's free memory. Raises SubstrateError, BudgetError or LayoutError.
    """

    def sizes_of(substrate: Substrate) -> list[tuple[int, CacheSize]]:
        layers = kv_shape(config, checkpoint, substrate).layers
        longest = config.max_model_len or checkpoint.spec.max_position_embeddings
        buffers = 2 * config.max_num_seqs
        return [
            (
                config.page_bytes or choose_page(spec, min(METAL_PAGES), METAL_PAGES),
                CacheSize(count, spec, longest, config.heap_bytes, buffers),
            )
            for spec, count in Counter(layers).items()
        ]

    choice = machine_substrate(
        config.substrate,
        sizes_of,
        release_heaps=config.release_heaps,
        map_while_running=config.map_while_running,
    )
    return plan_on(choice, config, checkpoint, budget_bytes)


def plan_on(
    choice: SubstrateChoice,
    config: EngineConfig,
    checkpoint: Checkpoint,
    budget_bytes: int | None = None,
) -> EnginePlan:
    """Do as ``plan_for_this_machine`` with a substrate that has been chosen already."""
    machine = memory_for(choice.substrate)
    if budget_bytes is not None:
        machine = replace(machine, total_bytes=budget_bytes, available_bytes=budget_bytes)
        config = replace(config, headroom_bytes=0)
    plan = plan_engine(config, checkpoint, machine, choice)
    if choice.substrate is Substrate.POSIX:
        largest = max(group.heap_bytes for group in plan.memory.layout.groups)
        check_heap_file(largest, system_file_limit())
    return plan


def check_heap_file(heap_bytes: int, limit_bytes: int | None) -> None:
    if limit_bytes is not None and heap_bytes > limit_bytes:
        raise BudgetError(
            f"a heap of {gib(heap_bytes)} is a file to the system, and this process may have none "
            f"of more than {gib(limit_bytes)}: raise that limit (`ulimit -f unlimited`)"
        )


def machine_substrate(
    setting: str,
    sizes_of: Callable[[Substrate], list[tuple[int, CacheSize]]],
    *,
    release_heaps: bool | None = None,
    map_while_running: bool | None = None,
) -> SubstrateChoice:
    """Choose a substrate. A GPU's substrate is tested first with the sizes of the model's cache.

    setting: "auto" or a substrate's name. sizes_of: returns the bytes of a page and the size of the
    cache for each kind of layer. release_heaps, map_while_running: whether a GPU frees heaps, and
    maps memory while steps run; None allows each after its self-test. Raises SubstrateError.
    """
    device = metal_device()

    def test(substrate: Substrate) -> str:
        assert device is not None
        if missing := device.missing[substrate.setting]:
            return "; ".join(missing)
        for page_bytes, size in sizes_of(substrate):
            # A dense cache is allocated in full: do not allocate its whole size for a test.
            real_size = None if substrate.is_dense else size
            report = run_selftest(SelfTest.SUBSTRATE, substrate, page_bytes, real_size)
            if report.fault:
                return report.fault
        return ""

    choice = choose_substrate(
        setting,
        no_metal=why_no_metal(device),
        trial=test,
        remembered=lambda substrate: FaultMemory(substrate).found(),
    )
    choice = choose_release(choice, release_heaps, partial(has_passed, SelfTest.RELEASE))
    choice = choose_mapping(choice, map_while_running, partial(has_passed, SelfTest.STRESS))
    if choice.substrate.on_gpu and (warning := wheel_warning(this_machine().processor)):
        return replace(choice, warnings=(*choice.warnings, warning))
    return choice


def metal_device() -> MetalDevice | None:
    capabilities = metal_ext.metal_capabilities() if metal_ext.HAS_METAL else {}
    return MetalDevice.of(capabilities) if capabilities else None


def why_no_metal(device: MetalDevice | None) -> str:
    """Return the reason why this build or machine cannot use a GPU, or ""."""
    if not metal_ext.HAS_METAL:
        return NO_METAL
    return NO_DEVICE if device is None else ""


def memory_of_all_models(config: EngineConfig) -> int:
    """Return the bytes that all models may use together: as many as a single model may."""
    on_cpu = config.substrate == Substrate.POSIX.setting or bool(why_no_metal(metal_device()))
    machine = memory_for(Substrate.POSIX if on_cpu else Substrate.SPARSE)
    return machine.usable_bytes(machine.headroom_bytes(config.headroom_bytes))


def memory_for(substrate: Substrate) -> MachineMemory:
    """Return the GPU's memory for a substrate on the GPU, else the machine's memory."""
    machine = machine_memory()
    if not substrate.on_gpu:
        return machine
    device = metal_device()
    assert device is not None
    return gpu_memory(machine, device.working_set_bytes, device.max_buffer_bytes)
