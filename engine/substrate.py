"""Chooses the substrate of this machine: as configured, or by trying."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import metal_ext
from engine.build import EnginePlan, kv_shape, plan_engine
from engine.config import EngineConfig
from engine.machine import MachineMemory, gpu_memory, machine_memory
from engine.models.checkpoint import Checkpoint
from kvcache.canary import stamp
from kvcache.canary.machine import this_machine
from kvcache.canary.run import SUBSTRATE, CacheSize, run_trial
from kvcache.canary.stamp import Passed
from kvcache.canary.wheel import wheel_warning
from kvcache.substrates import (
    NO_DEVICE,
    NO_METAL,
    SubstrateChoice,
    choose_mapping,
    choose_release,
    choose_substrate,
)
from kvcache.fault_memory import FaultMemory
from kvcache.layout import METAL_PAGES, choose_page
from kvcache.memory_budget import BudgetError, gib
from kvcache.substrates import MetalDevice
from kvcache.native_backends import system_file_limit
from kvcache.substrates import Substrate


def plan_for_this_machine(
    config: EngineConfig, checkpoint: Checkpoint, budget_bytes: int | None = None
) -> EnginePlan:
    """Choose the substrate, and fit model and cache into what it may use.

    budget_bytes: what it may use in all, whatever others use now; None: what the machine has left.
    Raises SubstrateError that names what a substrate that was asked for lacks; BudgetError or
    LayoutError with the figure that does not fit.
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
    """Fit model and cache into what a substrate may use that has been chosen, for this model or
    another. budget_bytes: as for ``plan_for_this_machine``. Raises BudgetError or LayoutError with
    the figure that does not fit."""
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
    """Raise BudgetError where the system lets no file become as large as a heap."""
    if limit_bytes is not None and heap_bytes > limit_bytes:
        raise BudgetError(
            f"a heap of {gib(heap_bytes)} is a file to the system, and this process may have none "
            f"of more than {gib(limit_bytes)}: raise that limit (`ulimit -f unlimited`)"
        )


def machine_substrate(
    asked: str,
    sizes_of: Callable[[Substrate], list[tuple[int, CacheSize]]],
    *,
    release_heaps: bool | None = None,
    map_while_running: bool | None = None,
) -> SubstrateChoice:
    """Try substrates of the GPU with the pages and addresses that the model's cache will have.

    asked: "auto", or what a substrate is called. sizes_of: for every kind of layers the bytes of a
    page of their cache, and what else it is made of. release_heaps: whether a GPU is to release
    heaps. map_while_running: whether it is to map memory while steps run. None: where it is known
    to bear that. Raises SubstrateError that names what the one that was asked for lacks, or which
    test has not passed.
    """
    device = metal_device()

    def trial(substrate: Substrate) -> str:
        assert device is not None
        missing = device.missing[substrate.setting]
        if missing:
            return "; ".join(missing)
        for page_bytes, size in sizes_of(substrate):
            # All of a dense cache is memory from the start: it is not made twice.
            argument = "" if substrate.is_dense else size.to_argument()
            if fault := run_trial(SUBSTRATE, substrate, page_bytes, argument).fault:
                return fault
        return ""

    choice = choose_substrate(
        asked,
        no_metal=why_no_metal(device),
        trial=trial,
        remembered=lambda substrate: FaultMemory(substrate).found(),
    )
    choice = choose_release(choice, release_heaps, partial(stamp.is_there, Passed.RELEASE))
    choice = choose_mapping(choice, map_while_running, partial(stamp.is_there, Passed.STRESS))
    if choice.substrate.on_gpu and (wrong := wheel_warning(this_machine().processor)):
        return replace(choice, warnings=(*choice.warnings, wrong))
    return choice


def metal_device() -> MetalDevice | None:
    """Return the Metal device; None where this build has no Metal, or the machine no device."""
    capabilities = metal_ext.metal_capabilities() if metal_ext.HAS_METAL else {}
    return MetalDevice.of(capabilities) if capabilities else None


def why_no_metal(device: MetalDevice | None) -> str:
    """Return why nothing can be done on a GPU here, or ""."""
    if not metal_ext.HAS_METAL:
        return NO_METAL
    return NO_DEVICE if device is None else ""


def memory_of_all_models(config: EngineConfig) -> int:
    """Return how many bytes several models may use together on this machine: as many as one that is
    served alone may use."""
    on_cpu = config.substrate == Substrate.POSIX.setting or bool(why_no_metal(metal_device()))
    machine = memory_for(Substrate.POSIX if on_cpu else Substrate.SPARSE)
    return machine.usable_bytes(machine.headroom_bytes(config.headroom_bytes))


def memory_for(substrate: Substrate) -> MachineMemory:
    """Return what the processor that computes may use of this machine."""
    machine = machine_memory()
    if not substrate.on_gpu:
        return machine
    device = metal_device()
    assert device is not None
    return gpu_memory(machine, device.working_set_bytes, device.max_buffer_bytes)
