import os
import resource
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import metal_ext
from engine.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from engine.models.packed_qwen3 import PackedQwen3
from engine.models.qwen3 import Qwen3
from engine.weights import Arithmetic, choose_arithmetic, load_qwen3, load_reference
from tests.models import write_model

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
        (Arithmetic.STORED, {mx.bfloat16, mx.uint32}),
        (Arithmetic.QUANTIZED_FLOAT32, {mx.float32, mx.uint32}),
        (Arithmetic.FLOAT32, {mx.float32}),
    ],
)
def test_weights_are_what_the_arithmetic_says(
    tmp_path: Path, arithmetic: Arithmetic, dtypes: set[mx.Dtype]
) -> None:
    found = read_checkpoint(write_model(tmp_path, dtype="bfloat16", bits=4))
    model = load_reference(found, arithmetic, lambda *_: None)
    assert {array.dtype for _, array in tree_flatten(model.parameters())} == dtypes


@pytest.mark.parametrize(
    ("arithmetic", "kind"), [(Arithmetic.FLOAT32, Qwen3), (Arithmetic.PACKED, PackedQwen3)]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_loading_reports_progress_up_to_the_last_byte(
    tmp_path: Path, arithmetic: Arithmetic, kind: type, dtype: str
) -> None:
    seen: list[tuple[int, int]] = []
    found = read_checkpoint(write_model(tmp_path, dtype=dtype))
    workers = metal_ext.CpuWorkers(1)
    model = load_qwen3(found, arithmetic, lambda *at: seen.append(at), workers)
    assert type(model) is kind
    done = [at for at, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert len(done) > 4
    assert {total for _, total in seen} == {done[-1]}


def test_importing_mlx_lm_does_not_lower_the_limit_of_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard != 4096 or os.sysconf("SC_OPEN_MAX") == 4096
