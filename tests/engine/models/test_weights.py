import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

import metal_ext
from engine.models.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from engine.models.cpu_ops import CpuOps
from engine.models.mlx_ops import MlxOps
from engine.models.weights import Arithmetic, choose_arithmetic, load_model
from tests.models import ModelSpec, write_model

GIB = 1024**3


@pytest.fixture
def checkpoint(tiny_model: Path) -> Checkpoint:
    return replace(
        read_checkpoint(tiny_model),
        num_weights=GIB,
        stored_bytes=GIB // 2,
        widened_bytes=GIB,
        packed_bytes=GIB // 4,
    )


def test_a_gpu_multiplies_what_is_stored(checkpoint: Checkpoint) -> None:
    choice = choose_arithmetic(checkpoint, on_gpu=True, memory_bytes=0, setting=None)
    assert (choice.arithmetic, choice.weights_bytes) == (Arithmetic.STORED, GIB // 2)
    assert choice.itemsize == 4, "the checkpoint is of float32"


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("memory", [0, 8 * GIB])
def test_a_cpu_multiplies_what_is_stored_by_its_own_kernels(
    checkpoint: Checkpoint, quantized: bool, memory: int
) -> None:
    found = replace(checkpoint, quantized=quantized)
    choice = choose_arithmetic(found, on_gpu=False, memory_bytes=memory, setting=None)
    assert (choice.arithmetic, choice.weights_bytes) == (Arithmetic.PACKED, GIB // 4)
    assert choice.itemsize == 4
    assert choice.reason


@pytest.mark.parametrize(
    ("quantized", "memory", "arithmetic", "size"),
    [
        (False, 8 * GIB, Arithmetic.FLOAT32, 4 * GIB),
        (False, 1 * GIB, Arithmetic.FLOAT32, 4 * GIB),  # the memory plan will refuse it by name
        (True, 8 * GIB, Arithmetic.FLOAT32, 4 * GIB),
        (True, 3 * GIB, Arithmetic.QUANTIZED_FLOAT32, GIB),
    ],
)
def test_what_a_cpus_kernels_do_not_know_is_float32_and_grouped_only_for_want_of_memory(
    checkpoint: Checkpoint, quantized: bool, memory: int, arithmetic: Arithmetic, size: int
) -> None:
    found = replace(checkpoint, quantized=quantized, packed_bytes=None)
    choice = choose_arithmetic(found, on_gpu=False, memory_bytes=memory, setting=None)
    assert (choice.arithmetic, choice.weights_bytes) == (arithmetic, size)
    assert choice.reason


@pytest.mark.parametrize("asked", list(Arithmetic))
def test_the_users_choice_wins(checkpoint: Checkpoint, asked: Arithmetic) -> None:
    choice = choose_arithmetic(checkpoint, on_gpu=False, memory_bytes=0, setting=asked)
    assert choice.arithmetic is asked
    assert choice.reason == "as configured"


@pytest.mark.parametrize("on_gpu", [False, True])
def test_packed_weights_are_refused_where_they_cannot_be_had(
    checkpoint: Checkpoint, on_gpu: bool
) -> None:
    found = replace(checkpoint, packed_bytes=GIB if on_gpu else None)
    with pytest.raises(CheckpointError, match=r"engine\.arithmetic is packed, .* all stored alike"):
        choose_arithmetic(found, on_gpu=on_gpu, memory_bytes=GIB, setting=Arithmetic.PACKED)


@pytest.mark.parametrize(
    ("arithmetic", "dtypes"),
    [
        # The norms of queries and keys are float32.
        (Arithmetic.STORED, {mx.bfloat16, mx.uint32, mx.float32}),
        (Arithmetic.QUANTIZED_FLOAT32, {mx.float32, mx.uint32}),
        (Arithmetic.FLOAT32, {mx.float32}),
    ],
)
def test_weights_are_what_the_arithmetic_says(
    tmp_path: Path, arithmetic: Arithmetic, dtypes: set[mx.Dtype]
) -> None:
    found = read_checkpoint(write_model(tmp_path, dtype="bfloat16", bits=4))
    model = load_model(found, arithmetic, lambda *_: None, None)
    assert {array.dtype for array in model.weights} == dtypes


@pytest.mark.parametrize(
    ("arithmetic", "kind"), [(Arithmetic.FLOAT32, MlxOps), (Arithmetic.PACKED, CpuOps)]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_loading_reports_progress_up_to_the_last_byte(
    tmp_path: Path, arithmetic: Arithmetic, kind: type, dtype: str
) -> None:
    seen: list[tuple[int, int]] = []
    found = read_checkpoint(write_model(tmp_path, dtype=dtype))
    workers = metal_ext.CpuWorkers(1)
    model = load_model(found, arithmetic, lambda *at: seen.append(at), workers)
    assert type(model.ops) is kind
    done = [at for at, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert len(done) > 4
    assert {total for _, total in seen} == {done[-1]}


def test_every_tensor_of_a_model_is_a_weight_of_its_steps(tmp_path: Path) -> None:
    found = read_checkpoint(write_model(tmp_path, ModelSpec(tie_word_embeddings=False)))
    model = load_model(found, Arithmetic.STORED, lambda *_: None, None)
    assert sum(array.nbytes for array in model.weights) == found.stored_bytes


def test_serving_imports_nothing_that_lowers_the_limit_of_open_files() -> None:
    """mlx-lm does, for the whole process."""
    code = "import sys, metal_ext, engine.build; assert not {'mlx_lm', 'mlx.nn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
