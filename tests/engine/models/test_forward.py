"""One forward over both kinds of operations, for each thing that a spec may say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.models.checkpoint import read_checkpoint
from kvcache.layout import KVFormat
from tests.engine.models.forwards import SPEC, cache_for, loaded, ours, prompt, spread, step
from tests.families import QWEN3_MOE
from tests.kvcache.managers import join
from tests.models import write_model

# float32 against float32 in another order, x in two bfloat16 parts where a matrix unit multiplies.
TOLERANCE = 1e-4
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["MLX", "packed"])
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 16,
    "long_factor": [1.0 + pair / 4 for pair in range(16)],
}


@BOTH
@pytest.mark.parametrize("how", [{"dtype": "float32"}, {"dtype": "float32", "bits": 4}], ids=str)
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("qwen3", {"rope_scaling": YARN}),
        ("qwen3", {"rope_scaling": LONG, "max_position_embeddings": 256}),
        ("llama", {}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("llama", {"rope_scaling": LLAMA3}),
        ("llama", {"rope_scaling": YARN}),
        ("qwen2", {}),
        ("qwen2", {"rope_scaling": LONG, "max_position_embeddings": 256}),
        ("qwen3_moe", QWEN3_MOE),
        ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": False, "decoder_sparse_step": 2}),
    ],
    ids=str,
)
def test_logits_equal_mlx_lms_with_and_without_norms_biases_and_tables(
    tmp_path: Path,
    model_type: str,
    changes: dict[str, Any],
    how: dict[str, Any],
    packed: bool,
) -> None:
    fields = {"architectures": [], **changes, "model_type": model_type}
    checkpoint, model, forward = loaded(tmp_path, packed=packed, **how, **fields)
    kv, ids, other = cache_for(checkpoint, KVFormat.FLOAT32), prompt(200), prompt(30, 1)
    assert join(kv, 1, 200)
    assert join(kv, 2, 30)
    got = [step(model, kv, [(1, 0, ids[:150])], list(range(150)))]
    both = step(model, kv, [(2, 0, other), (1, 150, ids[150:])], list(range(80)))
    assert spread(mx.concatenate([*got, both[30:]]), forward(ids)) < TOLERANCE
    assert spread(both[:30], forward(other)) < TOLERANCE


@BOTH
def test_an_untied_head_is_used(tmp_path: Path, packed: bool) -> None:
    untied = replace(SPEC, tie_word_embeddings=False)
    checkpoint, model, forward = loaded(tmp_path, untied, packed=packed)
    kv, ids = cache_for(checkpoint, KVFormat.FLOAT32), prompt(20)
    assert join(kv, 1, 20)
    assert spread(step(model, kv, [(1, 0, ids)], [19]), forward(ids)[-1:]) < TOLERANCE


@BOTH
def test_with_no_rows_only_the_cache_is_filled(tmp_path: Path, packed: bool) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC))
    model, ids = ours(checkpoint, packed=packed), prompt(50)

    def last_logits(first_rows: mx.array | None) -> np.ndarray[Any, Any]:
        kv = cache_for(checkpoint, KVFormat.FLOAT32)
        assert join(kv, 1, 50)
        assert kv.reserve(1, 49)
        views = kv.views([(1, 0, 49)])
        states = model.hidden(mx.array(ids[:49]), views, first_rows)
        assert (states is None) == (first_rows is None)
        mx.eval(views.step_end([] if states is None else [states]))
        kv.commit(1, ids[:49])
        return np.array(step(model, kv, [(1, 49, ids[49:])], [0]))

    assert np.array_equal(last_logits(None), last_logits(mx.array([48])))
