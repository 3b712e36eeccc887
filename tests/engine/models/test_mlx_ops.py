"""MLX's operations against mlx-lm's own forward."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.models.checkpoint import read_checkpoint
from engine.models.cpu_ops import CpuOps
from engine.models.mlx_ops import LEAST_SORTED_PAIRS, MlxOps, route
from engine.models.spec import Experts, ModelSpec
from engine.models.stored import StoredWeights
from engine.models.tensors import ModelTensors, model_tensors
from kvcache.layout import KVFormat
from metal_ext import CpuWorkers
from tests.engine.models.forwards import cache_for, loaded, prompt, spread, step
from tests.kvcache.managers import join
from tests.models import write_model

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


ITS = Experts(8, 3, inner_size=64, normalised=False, shared_inner_size=32)


def test_of_experts_with_equal_shares_the_first_ones_are_chosen() -> None:
    experts, weights = route(mx.array([[0.0] * 8, [0, 1, 0, 1, 0, 1, 0, 1]]), ITS)
    assert experts.tolist() == [[0, 1, 2], [1, 3, 5]]
    np.testing.assert_allclose(np.array(weights[0]), 1 / 8)
    _, normalised = route(mx.zeros((1, 8)), replace(ITS, normalised=True))
    np.testing.assert_allclose(np.array(normalised), 1 / 3)


def test_routers_tie_in_sixteen_bits_and_not_in_thirty_two() -> None:
    """Which is why answers are compared with mlx-lm's in float32: of so many logits in bfloat16 the
    last that is chosen and the first that is not are often equal, and then it is chance which
    expert computes. A CPU's router has float32."""
    logits = mx.random.normal((2000, 128), key=mx.random.key(3))

    def ties(shares: mx.array) -> int:
        falling = mx.sort(-shares, axis=-1)
        return int(np.count_nonzero(np.array(falling[:, 7] == falling[:, 8])))

    assert ties(mx.softmax(logits, axis=-1)) == 0
    narrow = mx.softmax(logits.astype(mx.bfloat16), axis=-1, precise=True)
    assert 100 < ties(narrow) < 1000


def shared_model(folder: Path) -> tuple[ModelSpec, ModelTensors, dict[str, mx.array]]:
    """Random weights of a model of one layer, with a shared expert."""
    dense = read_checkpoint(write_model(folder)).spec
    spec = replace(dense, layers=(replace(dense.layers[0], mlp=ITS),))
    tensors = model_tensors(spec, with_head=False)
    mx.random.seed(5)
    arrays = {name: 0.2 * mx.random.normal(shape) for name, shape in tensors.shapes.items()}
    return spec, tensors, arrays


@pytest.mark.parametrize("rows", [2, 1 + LEAST_SORTED_PAIRS // ITS.chosen])
def test_a_shared_expert_is_added_as_far_as_its_gate_is_open(tmp_path: Path, rows: int) -> None:
    spec, tensors, arrays = shared_model(tmp_path)
    plain = {name: np.array(array).astype(np.float64) for name, array in arrays.items()}
    at = "model.layers.0"

    def mlp(y: np.ndarray, name: str, expert: int | None = None) -> np.ndarray:
        gate, up, down = (
            plain[f"{at}.mlp.{name}.{which}_proj.weight"][() if expert is None else expert]
            for which in ("gate", "up", "down")
        )
        gates = gate @ y
        made: np.ndarray = down @ (gates / (1 + np.exp(-gates)) * (up @ y))
        return made

    x = mx.random.normal((rows, spec.hidden_size), key=mx.random.key(6))
    want = []
    for row in np.array(x).astype(np.float64):
        y = row / np.sqrt((row * row).mean() + spec.norm_eps)
        y = y * plain[f"{at}.post_attention_layernorm.weight"]
        shares = np.exp(plain[f"{at}.mlp.gate.weight"] @ y)
        shares /= shares.sum()
        out = row + sum(
            shares[expert] * mlp(y, "switch_mlp", int(expert))
            for expert in np.argsort(-shares)[: ITS.chosen]
        )
        opened = 1 / (1 + np.exp(-(plain[f"{at}.mlp.shared_expert_gate.weight"] @ y)))
        want.append(out + opened * mlp(y, "shared_expert"))
    for ops in (
        MlxOps(spec, tensors, StoredWeights(dict(arrays), lambda _: None)),
        CpuOps(spec, tensors, StoredWeights(dict(arrays), lambda _: None), CpuWorkers(1), print),
    ):
        np.testing.assert_allclose(np.array(ops.add_mlp(0, x)), np.array(want), atol=1e-4)
