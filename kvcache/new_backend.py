"""From the name of a substrate to what does its work."""

import metal_ext
from kvcache.backend import PageBackend
from kvcache.layout import Group
from kvcache.metal_backend import metal_backend
from kvcache.native_backends import dense_backend, posix_backend
from kvcache.substrates import Substrate


def new_backend(
    substrate: Substrate,
    group: Group,
    *,
    max_sequences: int,
    release_heaps: bool,
    workers: metal_ext.CpuWorkers | None,
) -> PageBackend:
    """max_sequences: that may be open at once. release_heaps: whether a Metal device may release
    heaps before the process ends. workers: of a CPU's substrates.

    Raises RuntimeError that names what a Metal device lacks.
    """
    if substrate.on_gpu:
        # A buffer need not be unmapped before the next sequence takes one; but slices cost memory.
        max_buffers = max_sequences if substrate.is_dense else 2 * max_sequences
        return metal_backend(
            substrate.setting, group, max_buffers=max_buffers, release_heaps=release_heaps
        )
    assert workers is not None, "the kernels of a CPU run on workers"
    make = dense_backend if substrate is Substrate.DENSE else posix_backend
    return make(group, workers)
