"""Makes the objects that manage memory of a KV backend: for K and V, and for recurrent states."""

from collections.abc import Sequence

import mlx.core as mx

import metal_ext
from kvcache.backends.backend import PageBackend, StateMemory
from kvcache.backends.choice import KVBackend
from kvcache.backends.metal import MetalBackend
from kvcache.backends.posix import NativeStates, PosixBackend
from kvcache.layout import Group, SlotLayout


def new_backends(
    kv_backend: KVBackend,
    groups: Sequence[Group],
    *,
    max_buffers: int,
    release_heaps: bool,
    maps_while_running: bool = False,
    workers: metal_ext.CpuWorkers | None,
    residency_keep_s: float = 0.0,
    weights: Sequence[mx.array] = (),
) -> list[PageBackend]:
    """Return a PageBackend for each group of layers. ``workers`` are the threads of a CPU's
    kernels.

    The other parameters are for a Metal device. A group has at most ``max_buffers`` buffers. Heaps
    may be released before the process ends if ``release_heaps`` is True, and mappings may change
    while steps run if ``maps_while_running`` is. Heaps and weights stay resident for
    ``residency_keep_s`` after a step. ``weights`` are evaluated arrays. Raises RuntimeError if the
    device lacks a feature, OSError if it refuses memory."""
    if kv_backend.on_gpu:
        return [
            MetalBackend(
                kv_backend.setting,
                group,
                max_buffers=max_buffers,
                release_heaps=release_heaps,
                maps_while_running=maps_while_running,
                residency_keep_s=residency_keep_s,
                weights=weights if group is groups[0] else (),
            )
            for group in groups
        ]
    assert workers is not None, "the kernels of a CPU run on workers"
    return [PosixBackend(group, workers, num_groups=len(groups)) for group in groups]


def new_states(
    slot: SlotLayout | None,
    num_slots: int,
    backend: PageBackend,
    workers: metal_ext.CpuWorkers | None,
) -> StateMemory | None:
    """Return memory for state slots, or None if the model has no recurrent layers. ``backend`` is
    that of the first group of layers, ``workers`` are a CPU's threads. Raises RuntimeError if slots
    do not fit, OSError if memory is refused."""
    if slot is None:
        return None
    if isinstance(backend, MetalBackend):
        return backend.new_states(slot, num_slots)
    assert workers is not None, "the kernels of a CPU run on workers"
    return NativeStates(slot, num_slots, workers)
