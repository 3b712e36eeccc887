import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from engine.models.checkpoint import read_checkpoint
from engine.models.cpu_ops import CpuOps
from engine.models.mlx_ops import MlxOps
from engine.models.weights import compute_itemsize, load_model
from kvcache.layout import KVFormat
from tests.engine.models.forwards import cache_for, ours, step
from tests.engine.models.hybrids import SPEC
from tests.families import QWEN3_MOE, QWEN3_NEXT, ROUTERS
from tests.kvcache.managers import join
from tests.models import ModelSpec, write_model


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_a_cpu_computes_in_float32_and_a_gpu_in_what_is_stored(dtype: str) -> None:
    assert compute_itemsize(dtype, on_gpu=False) == 4
    assert compute_itemsize(dtype, on_gpu=True) == (4 if dtype == "F32" else 2)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_loading_reports_progress_up_to_the_last_byte(
    tmp_path: Path, dtype: str, packed: bool
) -> None:
    seen: list[tuple[int, int]] = []
    found = read_checkpoint(write_model(tmp_path, dtype=dtype))
    workers = metal_ext.CpuWorkers(1) if packed else None
    model = load_model(found, lambda *at: seen.append(at), workers)
    assert type(model.ops) is (CpuOps if packed else MlxOps)
    done = [at for at, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert len(done) > 4
    assert {total for _, total in seen} == {done[-1]}


def test_every_tensor_of_a_model_is_a_weight_of_its_steps(tmp_path: Path) -> None:
    found = read_checkpoint(write_model(tmp_path, ModelSpec(tie_word_embeddings=False)))
    model = load_model(found, lambda *_: None, None)
    assert sum(array.nbytes for array in model.weights) == found.stored_bytes


def test_serving_imports_nothing_that_lowers_the_limit_of_open_files() -> None:
    """mlx-lm does, for the whole process."""
    code = "import sys, metal_ext, engine.build; assert not {'mlx_lm', 'mlx.nn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "how",
    [
        {"model_type": "qwen2", "architectures": []},
        {"dtype": "bfloat16", "spec": ModelSpec(tie_word_embeddings=False)},
        {"dtype": "bfloat16", "bits": 3, "group_size": 64},
        {"dtype": "bfloat16", "bits": 4, "mode": "mxfp4"},
        {"dtype": "bfloat16", "bits": 4, "layers": ROUTERS} | QWEN3_MOE,
        {"spec": SPEC} | QWEN3_NEXT,
    ],
    ids=str,
)
def test_aliases_of_weights_change_no_bit_of_a_model(
    tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, ids = read_checkpoint(write_model(tmp_path, **how)), list(range(40))

    def logits() -> mx.array:
        kv = cache_for(checkpoint, KVFormat.FLOAT32)
        assert join(kv, 1, len(ids))
        return step(ours(checkpoint, packed=False), kv, [(1, 0, ids)], ids)

    aliased = logits()
    monkeypatch.setattr(MlxOps, "stop_counting", lambda _: None)
    assert mx.array_equal(aliased, logits())
