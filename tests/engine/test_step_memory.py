"""What a step computes with at most, as figures."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.build import kv_shape, plan_engine
from engine.machine import MachineMemory
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.spec import Experts, GatedDeltaNet, Mixer
from engine.planning.shape import read_shape
from engine.step.sampler import SCORED_ROWS_AT_ONCE
from engine.step_memory import (
    SHORT_ROW_TOKENS,
    SHORT_SPLIT_TOKENS,
    SPLIT_TOKENS,
    activation_bytes,
    attention_scratch_bytes,
    memory_demand,
)
from kvcache.substrates import Substrate, SubstrateChoice
from tests.engines import CONFIG, SHAPE
from tests.models import TINY, write_config

ROOT = Path(__file__).parents[2]


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
    assert more(GatedDeltaNet(2, 4, 64, 64, 4)) == 4 * (2 * (512 + 2 * 256) - before)


def test_attention_has_its_scratch_memory_counted(checkpoint: Checkpoint) -> None:
    config = replace(CONFIG, max_num_seqs=32, max_model_len=None, page_bytes=None)
    (layer, _), spec = checkpoint.spec.layers, checkpoint.spec
    heads = replace(spec.attentions[0], heads=32, kv_heads=8, head_dim=128)
    spec = replace(spec, layers=(replace(layer, mixer=heads),) * 2)
    wide = replace(checkpoint, spec=replace(spec, max_position_embeddings=40960))

    def scratch(substrate: Substrate, **changes: int) -> int:
        shape = kv_shape(config, wide, substrate)
        return attention_scratch_bytes(wide.spec, replace(config, **changes), shape, substrate)  # type: ignore[arg-type]

    partials = 32 * 160 * 32 * (128 + 2) * 4
    for substrate in set(Substrate) - {Substrate.PAGED}:
        assert scratch(substrate) == partials, substrate
    gathered = 2 * 2 * 40960 * 8 * 128 * 4
    assert scratch(Substrate.PAGED) == partials + gathered
    for longest, splits in ((1025, 9), (2049, 16), (4097, 17)):
        assert scratch(Substrate.SPARSE, max_model_len=longest) == 32 * splits * 32 * 130 * 4
    config = replace(config, kv_budget_bytes=None)
    machine = MachineMemory(1 << 36, 1 << 36, 1 << 33, on_gpu=True)
    for dtype, itemsize in (("BF16", 2), ("F16", 2), ("F32", 4)):
        stored = replace(wide, dtype=dtype)
        plan = plan_engine(config, stored, machine, SubstrateChoice(Substrate.SPARSE, ()))
        bound = activation_bytes(wide.spec, config, itemsize)
        assert plan.memory.demand.activation_bytes == bound + partials, dtype


def test_the_kernels_sum_as_many_positions_at_a_time_as_the_plan_thinks() -> None:
    kernels = ROOT / "metal_ext" / "kernels"
    on_gpu = (kernels / "metal" / "arguments.h").read_text()
    assert f"kSplitTokens = {SPLIT_TOKENS}," in on_gpu
    assert f"kShortSplitTokens = {SHORT_SPLIT_TOKENS}," in on_gpu
    assert f"kShortRowTokens = {SHORT_ROW_TOKENS}," in on_gpu
    assert f"kSplitTokens = {SPLIT_TOKENS};" in (kernels / "cpu" / "kernels.h").read_text()


# --- beside weights and cache -------------------------------------------------------------------


GIB = 1024**3


def test_a_demand_is_all_but_the_weights(tmp_path: Path) -> None:
    spec = read_shape(write_config(tmp_path, TINY)).spec
    config = replace(CONFIG, headroom_bytes=None)
    found = memory_demand(spec, config, MachineMemory(10 * GIB, 9 * GIB), SHAPE, Substrate.POSIX, 4)
    assert (found.machine_bytes, found.available_bytes) == (10 * GIB, 9 * GIB)
    assert (found.headroom_bytes, found.usable_bytes) == (2 * GIB, 8 * GIB)
    attention = attention_scratch_bytes(spec, config, SHAPE, Substrate.POSIX)
    assert found.activation_bytes == activation_bytes(spec, config, 4) + attention
    assert found.fixed_bytes == found.activation_bytes + config.mlx_cache_bytes


def test_a_token_passes_the_experts_that_it_chooses_and_the_shared_one() -> None:
    mixture = Experts(8, 3, inner_size=10, normalised=True)
    assert mixture.numbers_per_token(100) == 3 * (3 * 10 + 2 * 100) + 2 * 8
    shared = replace(mixture, shared_inner_size=7)
    assert shared.numbers_per_token(100) - mixture.numbers_per_token(100) == 3 * 7
