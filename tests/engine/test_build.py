from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import activation_bytes, build_engine, kv_shape, plan_engine
from engine.checkpoint import Checkpoint, read_checkpoint
from engine.machine import MachineMemory
from engine.weights import Arithmetic
from kvcache.memory_budget import BudgetError
from tests.engines import CONFIG
from tests.models import write_model

MIB = 1024**2
MACHINE = MachineMemory(1024 * MIB, 900 * MIB)


@pytest.fixture
def checkpoint(tiny_model: Path) -> Checkpoint:
    return read_checkpoint(tiny_model)


def test_the_plan_names_every_choice_before_anything_is_allocated(checkpoint: Checkpoint) -> None:
    config = replace(CONFIG, substrate="auto", threads=None, page_bytes=None)
    plan = plan_engine(config, checkpoint, MACHINE)
    assert plan.substrate == "posix"
    assert plan.threads >= 1
    assert plan.arithmetic.arithmetic is Arithmetic.FLOAT32
    assert plan.memory.demand.weights_bytes == 4 * checkpoint.num_weights
    assert plan.memory.demand.activation_bytes == activation_bytes(checkpoint, config)


def test_a_fifth_of_the_machine_is_left_to_others_unless_told_otherwise(
    checkpoint: Checkpoint,
) -> None:
    plan = plan_engine(replace(CONFIG, headroom_bytes=None), checkpoint, MACHINE)
    assert plan.memory.demand.headroom_bytes == MACHINE.total_bytes // 5
    assert plan_engine(CONFIG, checkpoint, MACHINE).memory.demand.headroom_bytes == 0


def test_a_model_that_does_not_fit_is_refused(checkpoint: Checkpoint) -> None:
    huge = replace(checkpoint, num_weights=10**9)
    with pytest.raises(BudgetError, match="weights"):
        plan_engine(replace(CONFIG, kv_budget_bytes=None), huge, MACHINE)


@pytest.mark.parametrize(
    ("dtype", "asked", "itemsize"),
    [
        ("F32", None, 4),
        ("BF16", None, 2),
        ("F16", None, 2),
        ("F32", "bfloat16", 2),
        ("BF16", "float32", 4),
    ],
)
def test_k_and_v_are_as_wide_as_the_checkpoint_unless_told_otherwise(
    checkpoint: Checkpoint, dtype: str, asked: str | None, itemsize: int
) -> None:
    shape = kv_shape(replace(CONFIG, kv_dtype=asked), replace(checkpoint, dtype=dtype))
    assert shape.itemsize == itemsize


def test_an_engine_is_built_without_another_blas(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metal_ext.fast_blas", None)
    config = replace(CONFIG, page_bytes=None)
    plan = plan_engine(config, read_checkpoint(tiny_model), MACHINE)
    assert build_engine(plan, config, lambda *_: None, lambda _: None).limits.vocab_size == 1024


def test_an_engine_is_built_and_has_decoded_before_it_is_handed_over(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, dtype="bfloat16", bits=8))
    config = replace(CONFIG, kv_budget_bytes=4 * MIB, page_bytes=None)
    plan = plan_engine(config, checkpoint, MACHINE)
    progress: list[tuple[int, int]] = []
    loop = build_engine(plan, config, lambda *at: progress.append(at), lambda _: None)
    assert progress[-1][0] == progress[-1][1]
    assert loop._runner.completed_epoch > 0
    assert loop.limits.vocab_size == checkpoint.vocab_size
    assert loop.limits.max_model_len == plan.memory.max_model_len
