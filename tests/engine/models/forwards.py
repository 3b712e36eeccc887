"""Random models, ours and mlx-lm's, and the steps of ours over a cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import metal_ext
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.forward import Forward
from engine.models.weights import load_model
from engine.step.runner import Model
from kvcache.backends.posix import NativeStates, PosixBackend
from kvcache.layout import KVFormat, paged_layout
from kvcache.manager import KVCacheManager
from tests.kvcache.managers import manager
from tests.models import SMALL, ModelSpec, write_model
from tests.reference import load_reference

SPEC = SMALL
NUM_SLOTS = 24


def cache_for(checkpoint: Checkpoint, format: KVFormat) -> KVCacheManager:
    layout = paged_layout(
        checkpoint.spec.kv_shape(format),
        max_tokens=512,
        heap_bytes=1 << 20,
        system_page_bytes=4096,
    )
    workers, slot = metal_ext.CpuWorkers(2), layout.shape.slot
    return manager(
        layout,
        [PosixBackend(group, workers) for group in layout.groups],
        budget_bytes=1 << 28,
        max_sequences=8,
        states=None if slot is None else NativeStates(slot, NUM_SLOTS, workers),
    )


def step(
    model: Model, kv: KVCacheManager, plan: list[tuple[int, int, list[int]]], rows: list[int]
) -> mx.array:
    """Runs (sequence, start, tokens) segments; returns the logits of the rows."""
    for seq, start, tokens in plan:
        assert kv.reserve(seq, start + len(tokens))
    views = kv.views([(seq, start, len(tokens)) for seq, start, tokens in plan])
    flat = [token for _, _, tokens in plan for token in tokens]
    states = model.hidden(mx.array(flat), views, mx.array(rows))
    assert states is not None
    logits = model.head(states)
    mx.eval(logits)
    for seq, _, tokens in plan:
        kv.commit(seq, tokens)
    kv.step_completed(views.epoch)
    return logits.astype(mx.float32)


def spread(got: mx.array, want: mx.array) -> float:
    """The greatest difference, in standard deviations of what is wanted."""
    return float(np.abs(np.array(got) - np.array(want)).max() / np.array(want).std())


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, SPEC.vocab_size, length).tolist()
    return tokens


def ours(checkpoint: Checkpoint, instruction_set: str = "auto", *, packed: bool = True) -> Forward:
    workers = metal_ext.CpuWorkers(2, instruction_set) if packed else None
    return load_model(checkpoint, lambda *_: None, workers)


def loaded(
    folder: Path, spec: ModelSpec = SPEC, *, packed: bool = True, **how: Any
) -> tuple[Checkpoint, Forward, Callable[[list[int]], mx.array]]:
    """A checkpoint, our model of it, and mlx-lm's logits of ids, in the numbers that ours computes
    with. packed: as a CPU has it, else as a GPU. how: as for write_model."""
    checkpoint = read_checkpoint(write_model(folder, spec, **how))
    reference = load_reference(checkpoint, stored=not packed)
    model = ours(checkpoint, packed=packed)
    return checkpoint, model, lambda ids: reference(mx.array([ids]))[0].astype(mx.float32)
