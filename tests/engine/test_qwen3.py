"""Our flat-token forward against mlx-lm's own, and against itself in other company."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from engine.checkpoint import Checkpoint, read_checkpoint
from engine.models.qwen3 import Qwen3, norm_and_rope
from engine.runner import Model
from engine.weights import Arithmetic, load_reference
from kvcache.layout import KVShape, paged_layout
from kvcache.manager import KVCacheManager
from kvcache.native_backends import posix_backend
from tests.kvcache.managers import join, manager
from tests.models import ModelSpec, write_model

SPEC = ModelSpec(
    num_hidden_layers=4,
    hidden_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    vocab_size=512,
)
# Greatest difference of a logit, in units of the logits' own standard deviation. float32: sums in
# another order. bfloat16: eight bits of mantissa in every product, through four layers.
# packed: MLX's packed products on a CPU sum in bfloat16 as well.
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.06, "packed bfloat16": 0.25}


def cache_for(checkpoint: Checkpoint, itemsize: int) -> KVCacheManager:
    shape = KVShape(checkpoint.num_layers, checkpoint.kv_heads, checkpoint.head_dim, itemsize)
    layout = paged_layout(shape, max_tokens=512, heap_bytes=1 << 20, system_page_bytes=4096)
    return manager(
        layout,
        posix_backend(layout.group, metal_ext.CpuWorkers(2)),
        budget_bytes=1 << 28,
        max_sequences=8,
    )


def step(
    model: Model, kv: KVCacheManager, plan: list[tuple[int, int, list[int]]], rows: list[int]
) -> mx.array:
    """Runs (sequence, start, tokens) segments; returns the logits of the rows."""
    for seq, start, tokens in plan:
        assert kv.reserve(seq, start + len(tokens))
    views = kv.views([(seq, start, len(tokens)) for seq, start, tokens in plan])
    flat = [token for _, _, tokens in plan for token in tokens]
    places = [start + i for _, start, tokens in plan for i in range(len(tokens))]
    states = model.hidden(mx.array(flat), mx.array(places), views, mx.array(rows))
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


def loaded(
    folder: Path, arithmetic: Arithmetic, **how: Any
) -> tuple[Checkpoint, Any, Callable[[list[int]], mx.array]]:
    checkpoint = read_checkpoint(write_model(folder, SPEC, **how))
    reference = load_reference(checkpoint, arithmetic, lambda *_: None)
    return checkpoint, reference, lambda ids: reference(mx.array([ids]))[0].astype(mx.float32)


@pytest.mark.parametrize(
    ("how", "arithmetic", "itemsize", "tolerance"),
    [
        ({"dtype": "float32"}, Arithmetic.FLOAT32, 4, TOLERANCE["float32"]),
        ({"dtype": "bfloat16"}, Arithmetic.STORED, 2, TOLERANCE["bfloat16"]),
        ({"dtype": "bfloat16"}, Arithmetic.FLOAT32, 4, TOLERANCE["float32"]),
        ({"dtype": "float16"}, Arithmetic.FLOAT32, 4, TOLERANCE["float32"]),
        ({"dtype": "float32", "bits": 4}, Arithmetic.QUANTIZED_FLOAT32, 4, TOLERANCE["float32"]),
        ({"dtype": "bfloat16", "bits": 4}, Arithmetic.STORED, 2, TOLERANCE["packed bfloat16"]),
        ({"dtype": "bfloat16", "bits": 8}, Arithmetic.QUANTIZED_FLOAT32, 4, TOLERANCE["float32"]),
        ({"dtype": "bfloat16", "bits": 4}, Arithmetic.FLOAT32, 4, TOLERANCE["float32"]),
    ],
)
def test_logits_equal_mlx_lms(
    tmp_path: Path, how: dict[str, Any], arithmetic: Arithmetic, itemsize: int, tolerance: float
) -> None:
    checkpoint, reference, forward = loaded(tmp_path, arithmetic, **how)
    kv, ids = cache_for(checkpoint, itemsize), prompt(90)
    assert join(kv, 1, 90)
    ours = Qwen3(reference)
    got = [step(ours, kv, [(1, 0, ids[:70])], list(range(70)))]
    got += [step(ours, kv, [(1, 70 + i, [ids[70 + i]])], [0]) for i in range(20)]
    assert spread(mx.concatenate(got), forward(ids)) < tolerance


@pytest.mark.parametrize(
    ("scaling", "scale"),
    [
        (None, 1.0),
        ({"type": "linear", "factor": 4.0}, 0.25),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, None),
    ],
)
def test_a_plain_rope_can_be_part_of_one_kernel_and_any_other_cannot(
    tmp_path: Path, scaling: dict[str, Any] | None, scale: float | None
) -> None:
    folder = write_model(tmp_path, SPEC)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    reference = load_reference(read_checkpoint(folder), Arithmetic.STORED, lambda *_: None)
    attention = reference.model.layers[0].self_attn
    how = norm_and_rope(attention)
    assert (how is None) == (scale is None)
    if how is not None:
        assert how.rope_scale == scale
        assert how.rope_base == attention.rope.base
        assert how.eps == attention.q_norm.eps
        assert how.query_weight.shape == how.key_weight.shape == (SPEC.head_dim,)
    attention.rope.traditional = True
    assert norm_and_rope(attention) is None


def test_an_untied_head_is_used(tmp_path: Path) -> None:
    spec = ModelSpec(tie_word_embeddings=False)
    checkpoint = read_checkpoint(write_model(tmp_path, spec))
    reference = load_reference(checkpoint, Arithmetic.FLOAT32, lambda *_: None)
    kv, ids = cache_for(checkpoint, 4), prompt(20)
    assert join(kv, 1, 20)
    got = step(Qwen3(reference), kv, [(1, 0, ids)], [19])
    assert spread(got, reference(mx.array([ids]))[0, -1:]) < TOLERANCE["float32"]


def test_chunks_and_company_change_no_logit_beyond_rounding(tmp_path: Path) -> None:
    checkpoint, reference, forward = loaded(tmp_path, Arithmetic.FLOAT32)
    kv, ours = cache_for(checkpoint, 4), Qwen3(reference)
    a, b, c = prompt(100, 1), prompt(60, 2), prompt(33, 3)
    for seq, ids in ((1, a), (2, b), (3, c)):
        assert join(kv, seq, len(ids))
    step(ours, kv, [(1, 0, a[:37])], [0])
    step(ours, kv, [(2, 0, b[:59]), (1, 37, a[37:40])], [0])
    got = step(ours, kv, [(2, 59, b[59:]), (1, 40, a[40:]), (3, 0, c)], [0, 60, 93])
    want = mx.stack([forward(b)[-1], forward(a)[-1], forward(c)[-1]])
    assert spread(got, want) < TOLERANCE["float32"]


def test_with_no_rows_only_the_cache_is_filled(tmp_path: Path) -> None:
    checkpoint, reference, forward = loaded(tmp_path, Arithmetic.FLOAT32)
    kv, ours, ids = cache_for(checkpoint, 4), Qwen3(reference), prompt(50)
    assert join(kv, 1, 50)
    assert kv.reserve(1, 49)
    views = kv.views([(1, 0, 49)])
    assert ours.hidden(mx.array(ids[:49]), mx.arange(49), views, None) is None
    mx.eval(views.step_end([]))
    kv.commit(1, ids[:49])
    got = step(ours, kv, [(1, 49, ids[49:])], [0])
    assert spread(got, forward(ids)[-1:]) < TOLERANCE["float32"]
