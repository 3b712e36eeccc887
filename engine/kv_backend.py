"""Chooses a backend (a way to map memory for K and V), and plans an engine for this backend."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import metal_ext
from engine.build import EnginePlan, plan_engine
from engine.config import EngineConfig
from engine.machine import MachineMemory, gpu_memory, machine_memory
from engine.models.checkpoint import Checkpoint
from kvcache.backends.choice import (
    NO_DEVICE,
    NO_METAL,
    KVBackend,
    KVBackendChoice,
    MetalDevice,
    choose_kv_backend,
    choose_mapping,
    choose_release,
)
from kvcache.backends.faults import FaultMemory
from kvcache.backends.posix import system_file_limit
from kvcache.budget import BudgetError, gib
from kvcache.selftest.machine import this_machine, wheel_warning
from kvcache.selftest.run import CacheSize, SelfTest, has_passed, run_selftest


def plan_for_this_machine(
    config: EngineConfig, checkpoint: Checkpoint, budget_bytes: int | None = None
) -> EnginePlan:
    """Choose the backend, and plan the model and its cache in the backend's memory. A GPU's backend
    is tested with the cache that is planned for it.

    The engine may use ``budget_bytes`` of memory (None means the memory that is free now). Raises
    KVBackendError, BudgetError or LayoutError.
    """

    def sizes_of(kv_backend: KVBackend) -> list[tuple[int, CacheSize]]:
        trial = KVBackendChoice(kv_backend, ())
        memory = plan_on(trial, config, checkpoint, budget_bytes).memory
        layers, layout, buffers = memory.layout.shape.layers, memory.layout, memory.max_buffers
        tokens = {group: group.address_bytes // group.bytes_per_token for group in layout.groups}
        return [
            (
                group.page_bytes,
                CacheSize(layers.count(spec), spec, tokens[group], group.heap_bytes, buffers),
            )
            for spec, group in zip(layout.shape.specs, layout.groups, strict=True)
        ]

    choice = machine_kv_backend(config, sizes_of)
    return plan_on(choice, config, checkpoint, budget_bytes)


def plan_on(
    choice: KVBackendChoice,
    config: EngineConfig,
    checkpoint: Checkpoint,
    budget_bytes: int | None = None,
) -> EnginePlan:
    """Plan as ``plan_for_this_machine`` does, with a backend that was chosen before."""
    machine = memory_for(choice.kv_backend)
    if budget_bytes is not None:
        machine = replace(machine, total_bytes=budget_bytes, available_bytes=budget_bytes)
        config = replace(config, headroom_bytes=0)
    plan = plan_engine(config, checkpoint, machine, choice)
    if choice.kv_backend is KVBackend.POSIX:
        heap_bytes = max(group.heap_bytes for group in plan.memory.layout.groups)
        limit_bytes = system_file_limit()
        if limit_bytes is not None and heap_bytes > limit_bytes:
            raise BudgetError(
                f"a heap of {gib(heap_bytes)} is a file to the system, and this process may have "
                f"none of more than {gib(limit_bytes)}: raise that limit (`ulimit -f unlimited`)"
            )
    return plan


def machine_kv_backend(
    config: EngineConfig, sizes_of: Callable[[KVBackend], list[tuple[int, CacheSize]]]
) -> KVBackendChoice:
    """Choose the configured backend, and how it may release and map memory. A GPU's backend is
    tested first, with the pairs of page bytes and cache size that ``sizes_of`` returns. Raises
    KVBackendError."""
    device = metal_device()

    def test(kv_backend: KVBackend) -> str:
        assert device is not None
        if missing := device.missing[kv_backend.setting]:
            return "; ".join(missing)
        for page_bytes, size in sizes_of(kv_backend):
            # A dense cache is allocated in full: do not allocate its whole size for a test.
            real_size = None if kv_backend.is_dense else size
            report = run_selftest(SelfTest.KV_BACKEND, kv_backend, page_bytes, real_size)
            if report.fault:
                return report.fault
        return ""

    choice = choose_kv_backend(
        config.kv_backend,
        no_metal=why_no_metal(device),
        trial=test,
        remembered=lambda kv_backend: FaultMemory(kv_backend).found(),
    )
    choice = choose_release(choice, config.release_heaps, partial(has_passed, SelfTest.RELEASE))
    choice = choose_mapping(choice, config.map_while_running, partial(has_passed, SelfTest.STRESS))
    if not choice.kv_backend.on_gpu:
        return choice
    crash = FaultMemory(choice.kv_backend).warning()
    more = filter(None, (crash, wheel_warning(this_machine().processor)))
    return replace(choice, warnings=(*choice.warnings, *more))


def metal_device() -> MetalDevice | None:
    capabilities = metal_ext.metal_capabilities() if metal_ext.HAS_METAL else {}
    return MetalDevice.of(capabilities) if capabilities else None


def why_no_metal(device: MetalDevice | None) -> str:
    """Return the reason why this build or machine cannot use a GPU, or "" if it can."""
    if not metal_ext.HAS_METAL:
        return NO_METAL
    return NO_DEVICE if device is None else ""


def memory_of_all_models(config: EngineConfig) -> int:
    """Return the bytes that all models on this machine may use together."""
    on_cpu = config.kv_backend == KVBackend.POSIX.setting or bool(why_no_metal(metal_device()))
    machine = memory_for(KVBackend.POSIX if on_cpu else KVBackend.SPARSE)
    return machine.usable_bytes(machine.headroom_bytes(config.headroom_bytes))


def memory_for(kv_backend: KVBackend) -> MachineMemory:
    machine = machine_memory()
    if not kv_backend.on_gpu:
        return machine
    device = metal_device()
    assert device is not None
    limits = device.working_set_bytes, device.max_buffer_bytes, device.address_bytes
    return gpu_memory(machine, *limits)
