"""The figures that Qwen3-4B is known by, and the memory of a step."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import kv_shape, plan_engine
from engine.machine import MachineMemory
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.config import Quantization
from engine.models.spec import Experts, GatedDeltaNet, Mixer
from engine.planning.cost import TILE_HEADS
from engine.planning.memory import (
    BF16,
    CONTEXTS,
    Q4,
    Q8,
    SHORT_ROW_TOKENS,
    SHORT_SPLIT_TOKENS,
    SPLIT_TOKENS,
    ModelShape,
    Packing,
    activation_bytes,
    attention_scratch_bytes,
    memory_demand,
    own_packing,
    read_shape,
    resident,
    weights_bytes,
)
from engine.step.sampler import SCORED_ROWS_AT_ONCE
from kvcache.backends.choice import KVBackend, KVBackendChoice
from tests.engines import CONFIG, SHAPE
from tests.models import QWEN3_4B, TINY, write_config

KIB = 1024
GIB = 1024**3


@pytest.mark.parametrize(
    ("packing", "gib"),
    [
        (BF16, [7.8, 8.1, 8.6, 9.7, 12.0, 16.5, 25.5]),
        (Q8, [4.3, 4.5, 5.1, 6.2, 8.5, 13.0, 22.0]),
        (Q4, [2.4, 2.7, 3.2, 4.4, 6.6, 11.1, 20.1]),
    ],
    ids=str,
)
def test_qwen3_4b_takes_so_much_memory_by_context(
    qwen3_4b: ModelShape, packing: Packing, gib: list[float]
) -> None:
    """144 KiB a token."""
    assert tuple(KIB * n for n in (2, 4, 8, 16, 32, 64, 128)) == CONTEXTS
    sizes = [resident(qwen3_4b, packing, tokens) for tokens in CONTEXTS]
    assert [round(size.total_bytes / GIB, 1) for size in sizes] == gib
    assert sizes[0].kv_bytes == 2 * KIB * 144 * KIB


def test_norms_are_never_packed(qwen3_4b: ModelShape) -> None:
    assert weights_bytes(qwen3_4b, BF16) == 2 * qwen3_4b.parameters
    norms = 2 * qwen3_4b.vector_numbers
    assert weights_bytes(qwen3_4b, Q4) == qwen3_4b.matrix_numbers * 9 // 16 + norms


@pytest.mark.parametrize(
    ("stored", "name", "on_gpu", "on_cpu"),
    [
        (Quantization(4, 64), "q4", 4.5, 4.5),
        (Quantization(8, 128), "q8", 8.25, 8.25),
        (Quantization(3, 64), "q3", 3.5, 4.5),
        (Quantization(2, 32), "q2", 3.0, 5.0),
        (Quantization(5, 128), "q5", 5.25, 8.25),
        (Quantization(6, 64), "q6", 6.5, 8.5),
        (Quantization(4, 32, "mxfp4"), "mxfp4", 4.25, 4.25),
        (Quantization(8, 32, "mxfp8"), "mxfp8", 8.25, 16.0),
        (Quantization(4, 16, "nvfp4"), "nvfp4", 4.5, 16.0),
    ],
    ids=str,
)
def test_a_gpu_keeps_what_is_stored_and_a_cpu_what_its_kernels_read(
    stored: Quantization, name: str, on_gpu: float, on_cpu: float
) -> None:
    assert own_packing(stored, on_gpu=True) == Packing(name, on_gpu)
    assert own_packing(stored, on_gpu=False) == Packing(name, on_cpu)


def test_qwen3_4b_has_the_parameters_that_its_files_have(
    qwen3_4b: ModelShape, tmp_path: Path
) -> None:
    assert (qwen3_4b.matrix_numbers, qwen3_4b.parameters) == (4_022_272_000, 4_022_468_096)
    untied = read_shape(write_config(tmp_path, QWEN3_4B, tie_word_embeddings=False))
    assert untied.parameters == qwen3_4b.parameters + 151936 * 2560


def test_the_shape_agrees_with_the_checkpoint(tiny_model: Path) -> None:
    shape, checkpoint = read_shape(tiny_model), read_checkpoint(tiny_model)
    assert shape.parameters == checkpoint.num_weights
    assert shape.spec == checkpoint.spec


ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkpoint(tiny_model: Path) -> Checkpoint:
    return read_checkpoint(tiny_model)


def test_a_step_is_bounded_by_its_tokens_and_by_the_rows_that_have_logits(
    checkpoint: Checkpoint,
) -> None:
    def bound(itemsize: int = 4, **changes: int) -> int:
        return activation_bytes(checkpoint.spec, replace(CONFIG, **changes), itemsize)  # type: ignore[arg-type]

    many = SCORED_ROWS_AT_ONCE + 1
    token = 4 * (6 * 64 + 3 * 128 + 4 * (2 + 2) * 32)
    row = 4 * 5 * 1024
    few = bound(max_num_batched_tokens=1, max_num_seqs=1)
    assert few == token + SCORED_ROWS_AT_ONCE * row
    assert bound(max_num_batched_tokens=3, max_num_seqs=many) == 3 * token + many * row
    half = bound(2, max_num_batched_tokens=3, max_num_seqs=many)
    assert half == 3 * token // 2 + many * row, (
        "logits are float32 whatever the model computes with"
    )


def test_a_recurrent_layer_and_an_output_gate_are_counted(checkpoint: Checkpoint) -> None:
    layer, spec = checkpoint.spec.layers[0], checkpoint.spec
    one = replace(CONFIG, max_num_batched_tokens=1)

    def more(mixer: Mixer) -> int:
        other = replace(spec, layers=(layer, replace(layer, mixer=mixer)))
        return activation_bytes(other, one, 4) - activation_bytes(spec, one, 4)

    attention = spec.attentions[0]
    assert more(replace(attention, output_gate=True)) == 4 * 4 * attention.heads * 32
    before = 4 * (2 + 2) * 32
    assert more(GatedDeltaNet(2, 4, 64, 64, 4)) == 4 * (2 * (2 * 512 + 2 * 256) - before)


def test_attention_has_its_scratch_memory_counted(checkpoint: Checkpoint) -> None:
    config = replace(CONFIG, max_num_seqs=32, max_model_len=None, page_bytes=None)
    (layer, _), spec = checkpoint.spec.layers, checkpoint.spec
    heads = replace(spec.attentions[0], heads=32, kv_heads=8, head_dim=128)
    spec = replace(spec, layers=(replace(layer, mixer=heads),) * 2)
    wide = replace(checkpoint, spec=replace(spec, max_position_embeddings=40960))

    def scratch(kv_backend: KVBackend, **changes: int) -> int:
        shape = kv_shape(config, wide, kv_backend)
        return attention_scratch_bytes(wide.spec, replace(config, **changes), shape, kv_backend)  # type: ignore[arg-type]

    partials = 32 * 160 * 32 * (128 + 2) * 4
    for kv_backend in set(KVBackend) - {KVBackend.PAGED}:
        assert scratch(kv_backend) == partials, kv_backend
    gathered = 2 * 2 * 40960 * 8 * 128 * 4
    assert scratch(KVBackend.PAGED) == partials + gathered
    for longest, splits in ((1025, 9), (2049, 16), (4097, 17)):
        assert scratch(KVBackend.SPARSE, max_model_len=longest) == 32 * splits * 32 * 130 * 4
    config = replace(config, kv_budget_bytes=None)
    machine = MachineMemory(1 << 36, 1 << 36, 1 << 33, on_gpu=True)
    for dtype, itemsize in (("BF16", 2), ("F16", 2), ("F32", 4)):
        stored = replace(wide, dtype=dtype)
        plan = plan_engine(config, stored, machine, KVBackendChoice(KVBackend.SPARSE, ()))
        bound = activation_bytes(wide.spec, config, itemsize)
        assert plan.memory.demand.activation_bytes == bound + partials, dtype


def test_the_kernels_sum_as_many_positions_at_a_time_as_the_plan_thinks() -> None:
    kernels = ROOT / "metal_ext" / "kernels"
    on_gpu = (kernels / "metal" / "arguments.h").read_text()
    assert f"kSplitTokens = {SPLIT_TOKENS}," in on_gpu
    assert f"kShortSplitTokens = {SHORT_SPLIT_TOKENS}," in on_gpu
    assert f"kShortRowTokens = {SHORT_ROW_TOKENS}," in on_gpu
    assert f"kMostTileHeads = {TILE_HEADS}," in on_gpu
    assert f"kSplitTokens = {SPLIT_TOKENS};" in (kernels / "cpu" / "kernels.h").read_text()


def test_a_demand_is_all_but_the_weights(tmp_path: Path) -> None:
    spec = read_shape(write_config(tmp_path, TINY)).spec
    config = replace(CONFIG, headroom_bytes=None)
    found = memory_demand(spec, config, MachineMemory(10 * GIB, 9 * GIB), SHAPE, KVBackend.POSIX, 4)
    assert (found.machine_bytes, found.available_bytes) == (10 * GIB, 9 * GIB)
    assert (found.headroom_bytes, found.usable_bytes) == (2 * GIB, 8 * GIB)
    attention = attention_scratch_bytes(spec, config, SHAPE, KVBackend.POSIX)
    assert found.activation_bytes == activation_bytes(spec, config, 4) + attention
    assert found.fixed_bytes == found.activation_bytes + config.mlx_cache_bytes


def test_a_token_passes_the_experts_that_it_chooses_and_the_shared_one() -> None:
    mixture = Experts(8, 3, inner_size=10, normalised=True)
    assert mixture.numbers_per_token(100) == 3 * (3 * 10 + 2 * 100) + 2 * 8
    shared = replace(mixture, shared_inner_size=7)
    assert shared.numbers_per_token(100) - mixture.numbers_per_token(100) == 3 * 7
