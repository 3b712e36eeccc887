"""MLX's operations against mlx-lm's own forward."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kvcache.layout import KVFormat
from tests.engine.models.forwards import cache_for, loaded, prompt, spread, step
from tests.kvcache.managers import join

KV = {2: KVFormat.BFLOAT16, 4: KVFormat.FLOAT32}
# Greatest difference of a logit, in units of the logits' own standard deviation. float32: sums in
# another order. bfloat16: eight bits of mantissa in every product, through four layers.
# packed: MLX's packed products on a CPU sum in bfloat16 as well.
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.06, "packed bfloat16": 0.25}


@pytest.mark.parametrize(
    ("how", "itemsize", "tolerance"),
    [
        ({"dtype": "float32"}, 4, TOLERANCE["float32"]),
        ({"dtype": "bfloat16"}, 2, TOLERANCE["bfloat16"]),
        ({"dtype": "float32", "bits": 4}, 4, TOLERANCE["float32"]),
        ({"dtype": "float32", "bits": 3, "group_size": 64}, 4, TOLERANCE["float32"]),
        ({"dtype": "bfloat16", "bits": 4}, 2, TOLERANCE["packed bfloat16"]),
        ({"dtype": "bfloat16", "bits": 4, "mode": "mxfp4"}, 2, TOLERANCE["packed bfloat16"]),
        ({"dtype": "bfloat16", "bits": 8, "mode": "mxfp8"}, 2, TOLERANCE["packed bfloat16"]),
    ],
)
def test_logits_equal_mlx_lms(
    tmp_path: Path, how: dict[str, Any], itemsize: int, tolerance: float
) -> None:
    checkpoint, model, forward = loaded(tmp_path, packed=False, **how)
    kv, ids = cache_for(checkpoint, KV[itemsize]), prompt(90)
    assert join(kv, 1, 90)
    got = [step(model, kv, [(1, 0, ids[:70])], list(range(70)))]
    got += [step(model, kv, [(1, 70 + i, [ids[70 + i]])], [0]) for i in range(20)]
    assert spread(mx.concatenate(got), forward(ids)) < tolerance


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_positions_are_scaled_as_mlx_lm_does(tmp_path: Path, scaling: dict[str, Any]) -> None:
    checkpoint, model, forward = loaded(tmp_path, packed=False, rope_scaling=scaling)
    kv, ids = cache_for(checkpoint, KVFormat.FLOAT32), prompt(90)
    assert join(kv, 1, 90)
    got = step(model, kv, [(1, 0, ids)], list(range(90)))
    assert spread(got, forward(ids)) < TOLERANCE["float32"]


def test_chunks_and_company_change_no_logit_beyond_rounding(tmp_path: Path) -> None:
    checkpoint, model, forward = loaded(tmp_path, packed=False)
    kv = cache_for(checkpoint, KVFormat.FLOAT32)
    a, b, c = prompt(100, 1), prompt(60, 2), prompt(33, 3)
    for seq, ids in ((1, a), (2, b), (3, c)):
        assert join(kv, seq, len(ids))
    step(model, kv, [(1, 0, a[:37])], [0])
    step(model, kv, [(2, 0, b[:59]), (1, 37, a[37:40])], [0])
    got = step(model, kv, [(2, 59, b[59:]), (1, 40, a[40:]), (3, 0, c)], [0, 60, 93])
    want = mx.stack([forward(b)[-1], forward(a)[-1], forward(c)[-1]])
    assert spread(got, want) < TOLERANCE["float32"]
