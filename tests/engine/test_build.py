import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import metal_ext
from engine.build import (
    EnginePlan,
    build_engine,
    choose_activations,
    kv_shape,
    mlx_memory,
    plan_engine,
)
from engine.config import Activations
from engine.machine import MachineMemory
from engine.models.checkpoint import Checkpoint, promised_checkpoint, read_checkpoint
from engine.planning.memory import activation_bytes, attention_scratch_bytes
from engine.types import PrefixSalt
from kvcache.backends.choice import KVBackend, KVBackendChoice
from kvcache.budget import BudgetError
from kvcache.layout import KVFormat, LayoutError
from tests.engines import CONFIG, ON_CPU
from tests.models import QWEN3_4B, write_config, write_model

MIB = 1024**2
GIB = 1024**3
MACHINE = MachineMemory(1024 * MIB, 900 * MIB)
POSIX = ON_CPU["posix"]


@pytest.fixture
def checkpoint(tiny_model: Path) -> Checkpoint:
    return read_checkpoint(tiny_model)


@pytest.fixture
def plan(checkpoint: Checkpoint) -> EnginePlan:
    return plan_engine(replace(CONFIG, page_bytes=None), checkpoint, MACHINE, POSIX)


def test_the_plan_names_every_choice_before_anything_is_allocated(checkpoint: Checkpoint) -> None:
    config = replace(CONFIG, kv_backend="auto", threads=None, page_bytes=None)
    plan = plan_engine(config, checkpoint, MACHINE, POSIX)
    assert plan.kv_backend is POSIX
    assert plan.threads >= 1
    assert plan.arithmetic == "packed"
    assert plan.memory.demand.weights_bytes == checkpoint.packed_bytes
    attention = attention_scratch_bytes(
        checkpoint.spec, config, kv_shape(config, checkpoint, KVBackend.POSIX), KVBackend.POSIX
    )
    expected = activation_bytes(checkpoint.spec, config, 4) + attention
    assert plan.memory.demand.activation_bytes == expected


def words(plan: EnginePlan) -> str:
    return "\n".join(plan.lines())


def test_the_instruction_set_is_the_best_one_or_the_one_that_is_asked_for(
    checkpoint: Checkpoint,
) -> None:
    best, *_, last = metal_ext.instruction_sets()

    def planned(**settings: Any) -> EnginePlan:
        return plan_engine(replace(CONFIG, page_bytes=None, **settings), checkpoint, MACHINE, POSIX)

    assert f"kernels: {best}, " in words(planned())
    rounding = planned(instruction_set=last, activations="int8")
    assert f"kernels: {last}, " in words(rounding)
    assert "arithmetic: packed, x in int8" in words(rounding)
    assert "arithmetic: packed (" in words(planned(instruction_set=last))
    with pytest.raises(LayoutError, match=r"instruction_set is 'mmx', and this machine has \w+"):
        planned(instruction_set="mmx")


@pytest.mark.parametrize(
    ("instruction_set", "dtype", "quantised", "activations"),
    [
        ("amx", "BF16", True, "float32"),
        ("bf16", "BF16", True, "int8"),
        ("avx2", "F16", True, "int8"),
        ("dotprod", "BF16", True, "int8"),
        ("bf16", "BF16", False, "bfloat16"),
        ("bf16", "F32", False, "float32"),
        ("bf16", "F16", False, "float32"),
        ("amx", "BF16", False, "float32"),
        ("vnni", "BF16", False, "float32"),
        ("neon", "BF16", False, "float32"),
    ],
)
def test_activations_are_rounded_where_the_processor_gains_by_it(
    instruction_set: str, dtype: str, quantised: bool, activations: str
) -> None:
    assert choose_activations(instruction_set, dtype, quantised=quantised) == activations


@pytest.mark.parametrize(
    ("setting", "arithmetic"), [("auto", "packed, x in int8"), ("float32", "packed")]
)
def test_a_quantised_model_is_rounded_unless_float32_is_configured(
    tmp_path: Path, setting: Activations, arithmetic: str
) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path / "model", bits=4))
    last = metal_ext.instruction_sets()[-1]
    config = replace(CONFIG, page_bytes=None, instruction_set=last, activations=setting)
    assert plan_engine(config, checkpoint, MACHINE, POSIX).arithmetic == arithmetic


def test_the_plan_says_where_the_memory_goes(plan: EnginePlan) -> None:
    for word in ("arithmetic: packed", "KV backend: posix", "kernels: ", "products: quire's own"):
        assert word in words(plan)


def test_a_plan_for_a_gpu_says_what_computes_and_why_it_was_chosen(plan: EnginePlan) -> None:
    reasons = ("not sparse on Metal: it hung", "paged on Metal: it passed its canary")
    text = words(replace(plan, kv_backend=KVBackendChoice(KVBackend.PAGED, reasons)))
    assert "KV backend: paged on Metal; kernels: Metal\n" in text
    assert (
        "arithmetic: stored (the GPU multiplies what is stored); matrix products: quire's" in text
    )
    for reason in reasons:
        assert f"  {reason}" in text


def test_a_fifth_of_the_machine_is_left_to_others_unless_told_otherwise(
    checkpoint: Checkpoint,
) -> None:
    plan = plan_engine(replace(CONFIG, headroom_bytes=None), checkpoint, MACHINE, POSIX)
    assert plan.memory.demand.headroom_bytes == MACHINE.total_bytes // 5
    assert plan_engine(CONFIG, checkpoint, MACHINE, POSIX).memory.demand.headroom_bytes == 0


def test_a_model_that_does_not_fit_is_refused(checkpoint: Checkpoint) -> None:
    huge = replace(checkpoint, packed_bytes=10**9)
    with pytest.raises(BudgetError, match="weights"):
        plan_engine(replace(CONFIG, kv_budget_bytes=None), huge, MACHINE, POSIX)


def refusal(checkpoint: Checkpoint, machine_gib: float, **changes: Any) -> str:
    """Why a machine cannot serve it. checkpoint: in bfloat16."""
    memory = MachineMemory(int(machine_gib * GIB), int(machine_gib * GIB))
    config = replace(CONFIG, headroom_bytes=None, kv_budget_bytes=None, **changes)
    with pytest.raises(BudgetError) as caught:
        plan_engine(config, checkpoint, memory, POSIX)
    return str(caught.value)


@pytest.fixture(scope="module")
def qwen3_4b(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_config(tmp_path_factory.mktemp("models"), QWEN3_4B)
    return promised_checkpoint(folder, 8_044_982_000)


def test_a_model_that_can_never_fit_is_refused_with_what_would(qwen3_4b: Checkpoint) -> None:
    said = refusal(qwen3_4b, 6)
    assert "the weights alone take 7.49 GiB, of 4.80 GiB that are usable here" in said
    assert "in MLX's 4 bits its weights would take 2.11 GiB, and fit" in said
    assert "--" not in said, "no flag helps"
    said = refusal(qwen3_4b, 2)
    assert "4 bits its weights would still take 2.11 GiB: serve a smaller model" in said
    assert "--" not in said
    packed = replace(qwen3_4b, packed_bytes=2_262_000_000)
    assert refusal(packed, 2).endswith("before the first token of K and V; serve a smaller model")


def test_a_model_that_takes_what_is_left_to_others_is_told_so(qwen3_4b: Checkpoint) -> None:
    assert refusal(qwen3_4b, 9).endswith("; or lower --headroom, which is 1.80 GiB")
    assert "--headroom" not in refusal(qwen3_4b, 9, max_model_len=30000), "it would not be enough"
    config = replace(CONFIG, headroom_bytes=None, kv_budget_bytes=64 * MIB, page_bytes=None)
    memory = MachineMemory(9 * GIB, 9 * GIB)
    plan = plan_engine(config, qwen3_4b, memory, POSIX)
    assert plan.memory.kv_budget_bytes > 0, "whoever names a budget takes it from the others"


@pytest.mark.parametrize(
    ("dtype", "asked", "on_cpu", "on_gpu"),
    [
        ("F32", "auto", "float32", "float32"),
        ("BF16", "auto", "bfloat16", "bfloat16"),
        ("F16", "auto", "bfloat16", "float16"),
        ("F32", "bfloat16", "bfloat16", "bfloat16"),
        ("BF16", "float32", "float32", "float32"),
    ],
)
def test_k_and_v_are_as_wide_as_the_checkpoint_unless_told_otherwise(
    checkpoint: Checkpoint, dtype: str, asked: Any, on_cpu: str, on_gpu: str
) -> None:
    config, stored = replace(CONFIG, kv_dtype=asked), replace(checkpoint, dtype=dtype)
    for kv_backend, kept in ((KVBackend.POSIX, on_cpu), (KVBackend.SPARSE, on_gpu)):
        shape = kv_shape(config, stored, kv_backend)
        assert [its.format.value for its in shape.specs] == [kept]


def test_float16_is_for_a_gpu(checkpoint: Checkpoint) -> None:
    config = replace(CONFIG, kv_dtype="float16")
    (spec,) = kv_shape(config, checkpoint, KVBackend.SPARSE).specs
    assert spec.format is KVFormat.FLOAT16
    with pytest.raises(LayoutError, match=r"a CPU keeps .* cache\.dtype is float16"):
        kv_shape(config, checkpoint, KVBackend.POSIX)


def test_an_engine_is_built_and_has_decoded_before_it_is_handed_over(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, dtype="bfloat16", bits=8))
    config = replace(CONFIG, kv_budget_bytes=4 * MIB, page_bytes=None)
    plan = plan_engine(config, checkpoint, MACHINE, POSIX)
    progress: list[tuple[int, int]] = []
    loop = build_engine(plan, config, lambda *at: progress.append(at), lambda _: None)
    assert progress[-1][0] == progress[-1][1]
    assert loop._runner.completed_epoch > 0
    assert loop.limits.vocab_size == checkpoint.vocab_size
    assert loop.limits.max_model_len == plan.memory.max_model_len


def test_what_a_block_holds_is_named_by_the_models_content_and_not_by_its_place(
    tmp_path: Path,
) -> None:
    def first_parent(folder: Path, activations: Activations = "float32") -> bytes:
        config = replace(CONFIG, page_bytes=None, activations=activations)
        plan = plan_engine(config, read_checkpoint(folder), MACHINE, POSIX)
        loop = build_engine(plan, config, lambda *_: None, lambda _: None)
        return loop._kv.block_hashes(PrefixSalt()).parent(0)

    one, copy, other = tmp_path / "one", tmp_path / "copy", tmp_path / "other"
    write_model(one)
    shutil.copytree(one, copy)
    write_model(other, seed=1)
    assert first_parent(copy) == first_parent(one)
    assert first_parent(other) != first_parent(one)
    assert first_parent(one, "bfloat16") != first_parent(one)


def test_mlx_tells_what_its_arrays_take() -> None:
    before = mlx_memory()
    array = mx.ones((MIB,), dtype=mx.uint8)
    mx.eval(array)
    held = mlx_memory()
    assert held.active_bytes >= before.active_bytes + MIB
    assert held.peak_bytes >= held.active_bytes
    assert held.cache_bytes >= 0
