"""Whole engines around a random model, small enough for a test."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import metal_ext
from engine.build import assemble
from engine.config import EngineConfig
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.weights import load_model
from engine.step.loop import Emit, EngineLoop
from engine.step.runner import Model
from kvcache.backends.choice import KVBackend
from kvcache.budget import CacheRequest, MemoryDemand, fit
from kvcache.layout import KVFormat
from kvcache.slots import SLOTS_PER_SEQUENCE
from tests.engines import CONFIG, MACHINE, ON_CPU

VOCABULARY = 512
HEAP_TOKENS = 32


def load_hybrid(
    folder: Path, workers: metal_ext.CpuWorkers | None = None
) -> tuple[Checkpoint, Model]:
    """The model in a folder."""
    checkpoint = read_checkpoint(folder)
    workers = workers or metal_ext.CpuWorkers(1)
    return checkpoint, load_model(checkpoint, lambda *_: None, workers)


def hybrid_loop(
    checkpoint: Checkpoint,
    model: Model,
    emit: Emit,
    *,
    max_len: int = 256,
    room: tuple[int, int] | None = None,
    windows: bool = True,
    workers: metal_ext.CpuWorkers | None = None,
    **changes: Any,
) -> EngineLoop:
    """An engine of the calling thread. room: slots, and heaps of HEAP_TOKENS. windows: whether
    memory behind windows goes; else all of it is kept. changes: fields of EngineConfig."""
    config: EngineConfig = replace(CONFIG, **{"prefix_keep_s": 1000.0} | changes)
    request = CacheRequest(
        kv_backend=KVBackend.POSIX,
        settings=config,
        max_num_seqs=8,
        max_model_len=max_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    shape = checkpoint.spec.kv_shape(KVFormat.FLOAT32)
    memory = fit(
        MemoryDemand(MACHINE.total_bytes, MACHINE.available_bytes, 0, 0, 0, 0),
        request,
        shape if windows else shape.without_windows(),
        model_max_len=max_len,
        system_page_bytes=4096,
    )
    if room is not None:
        slots, heaps = room
        memory = replace(
            memory,
            num_slots=slots,
            kv_budget_bytes=heaps
            * HEAP_TOKENS
            // memory.layout.heap_tokens
            * memory.layout.heap_bytes,
            max_num_seqs=min(memory.max_num_seqs, slots // SLOTS_PER_SEQUENCE),
        )
    workers = workers or metal_ext.CpuWorkers(1)
    return assemble(memory, config, model, VOCABULARY, ON_CPU["posix"], workers, b"hybrid", emit)
