"""How long a step takes: the arithmetic by hand, and beside what others have measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.models.tensors import model_tensors
from engine.planning.cost import (
    ATTENTION_SHARE,
    EXPERT_READ_SHARE,
    KV_READ_SHARE,
    RECURRENCE_S,
    CostModel,
)
from engine.planning.devices import CPU, Device, Rates
from engine.planning.memory import BF16, Q4, ModelShape, kv_shape, read_shape, weights_bytes
from tests.engine.planning.test_capacity import MODELS, chip

DEVICE = replace(CPU, bytes_per_s=100e9, ops_per_s=10e12, rates=Rates(step_s=0.001))
KV_BYTES = 144 * 1024
GPU = Rates(0.9, 0.7, few_rows=12, vector_share=0.3, tile_share=0.8, tile_rows=32)


def cost_of(shape: ModelShape, device: Device = DEVICE) -> CostModel:
    return CostModel.of(device, shape.spec, weights_bytes(shape, BF16), kv_shape(shape))


def in_four_bits(folder: Path, model: str, device: Device = DEVICE) -> CostModel:
    shape = read_shape(MODELS[model].write(folder))
    return CostModel.of(device, shape.spec, weights_bytes(shape, Q4), kv_shape(shape))


def test_one_decoded_token_takes_the_time_to_read_weights_and_cache(qwen3_4b: ModelShape) -> None:
    read = weights_bytes(qwen3_4b, BF16) + KV_BYTES * 1001 / KV_READ_SHARE
    seconds = cost_of(qwen3_4b).step_seconds([(1000, 1)])
    assert seconds == pytest.approx(0.001 + read / 100e9, rel=1e-4)


def test_weights_are_read_once_for_all_sequences_of_a_step(qwen3_4b: ModelShape) -> None:
    cost = cost_of(qwen3_4b)
    more = cost.step_seconds([(1000, 1)] * 8) - cost.step_seconds([(1000, 1)])
    assert more == pytest.approx(7 * 1001 * KV_BYTES / KV_READ_SHARE / 100e9)


def test_a_chunk_of_a_prompt_takes_the_time_of_its_operations(qwen3_4b: ModelShape) -> None:
    """One row is multiplied by the head, which takes as long as to read it."""
    embedding = qwen3_4b.spec.vocab_size * qwen3_4b.spec.hidden_size
    ops = 2.0 * 512 * (qwen3_4b.matrix_numbers - embedding)
    ops += 4 * 36 * 32 * 128 * (512 * 100 + 512 * 513 // 2) / ATTENTION_SHARE
    expected = 0.001 + ops / 10e12 + 2 * embedding / 100e9
    assert cost_of(qwen3_4b).step_seconds([(100, 512)]) == pytest.approx(expected, rel=1e-4)


def test_a_draft_head_adds_the_time_of_what_makes_its_keys_and_values(qwen3_4b: ModelShape) -> None:
    spec, hidden = qwen3_4b.spec.with_draft_head(), qwen3_4b.spec.hidden_size
    more = model_tensors(spec, with_head=False).count(2) - qwen3_4b.matrix_numbers
    weights = weights_bytes(qwen3_4b, BF16) + 2 * more
    cost = CostModel.of(DEVICE, spec, weights, kv_shape(replace(qwen3_4b, spec=spec)))
    kept = hidden * (2 * hidden + (32 + 8 + 8) * 128)
    seconds = cost_of(qwen3_4b).step_seconds([(1000, 1)]) + 2 * kept / 100e9
    assert cost.step_seconds([(1000, 1)]) == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize("context", [100, 1000, 4000, 30_000, 100_000])
def test_a_layer_with_a_window_reads_no_more_than_that(qwen3_4b: ModelShape, context: int) -> None:
    """All layers but one of six have a window of 1024 tokens."""
    spec = qwen3_4b.spec
    layers = tuple(
        replace(layer, mixer=replace(mixer, window=1024)) if number % 6 < 5 else layer
        for number, (layer, mixer) in enumerate(zip(spec.layers, spec.attentions, strict=True))
    )
    windowed = replace(qwen3_4b, spec=replace(spec, layers=layers))
    saved = 5 / 6 * max(0, context - 1024) * KV_BYTES / KV_READ_SHARE / 100e9
    of_all, of_windows = (
        cost_of(shape).step_seconds([(context - 1, 1)]) for shape in (qwen3_4b, windowed)
    )
    assert of_all - of_windows == pytest.approx(saved, abs=2e-6)


@pytest.fixture
def mixture(tmp_path: Path) -> CostModel:
    return in_four_bits(tmp_path, "Qwen3-30B-A3B", replace(DEVICE, rates=GPU))


def test_of_experts_a_step_reads_those_that_its_tokens_choose(mixture: CostModel) -> None:
    """Qwen3-30B-A3B, whose figures are 30.5 billion parameters and 3.3 that are active."""
    ((experts, expert),) = mixture.expert_numbers.items()
    assert expert == 48 * 3 * 768 * 2048
    head = mixture.spec.vocab_size * mixture.spec.hidden_size
    assert mixture.dense_numbers + 8 * expert + 2 * head == pytest.approx(3.35e9, rel=1e-2)
    assert mixture.bytes_per_number == pytest.approx(4.5 / 8, rel=1e-4)
    assert [round(experts.distinct(n), 1) for n in (1, 4, 8, 1000)] == [8.0, 29.1, 51.6, 128.0]


@pytest.mark.parametrize(
    ("tokens", "rows"), [(1, 0), (4, 0), (63, 0), (512, 48), (2048, 144), (4096, 272)]
)
def test_experts_multiply_vectors_or_tiles(mixture: CostModel, tokens: int, rows: int) -> None:
    """rows: that each of the 128 experts multiplies, half a tile included; 0: they are read."""
    ((experts, expert),) = mixture.expert_numbers.items()
    numbers = experts.distinct(tokens) * expert
    read = numbers * 4.5 / 8 / (0.9 * (0.7 if tokens == 1 else EXPERT_READ_SHARE)) / 100e9
    computed = 2 * numbers * rows / 0.8 / 10e12
    assert mixture._experts_s(experts, tokens) == pytest.approx(max(read, computed), rel=1e-3)


@pytest.mark.parametrize(
    ("model", "times"),
    [
        ("Qwen3-30B-A3B", 1),
        ("Qwen3.5-0.8B", 1),
        ("Qwen3.5-4B", 1),
        ("Qwen3.6-27B", 1),
        ("Qwen3.6-35B-A3B", 1),
    ],
)
def test_eight_query_heads_read_a_row_of_the_cache_together(
    tmp_path: Path, model: str, times: int
) -> None:
    cost = in_four_bits(tmp_path, model)
    more = cost.step_seconds([(2000, 1)]) - cost.step_seconds([(1000, 1)])
    read = 1000 * times * cost.kv.bytes_per_token / KV_READ_SHARE
    assert more == pytest.approx(read / 100e9)


@pytest.mark.parametrize(
    ("model", "state_mib", "kv_kib"), [("Qwen3.6-27B", 146.8, 64), ("Qwen3.6-35B-A3B", 61.4, 20)]
)
def test_states_are_read_and_written_whatever_the_length(
    tmp_path: Path, model: str, state_mib: float, kv_kib: int
) -> None:
    """A matrix of float32 and three rows for each value head, in three of four layers."""
    cost = in_four_bits(tmp_path, model)
    assert cost.kv.bytes_per_token == kv_kib * 1024
    stateless = replace(cost, kv=replace(cost.kv, states=()))
    more = cost.step_seconds([(1000, 1)]) - stateless.step_seconds([(1000, 1)])
    assert more == pytest.approx(2 * state_mib * 1024**2 / 100e9, rel=1e-2)
    prompt = cost._mixers_s(0, 513) - cost._mixers_s(0, 1)
    assert prompt > 512 * RECURRENCE_S * len(cost.spec.recurrences)


@pytest.mark.parametrize(
    ("rows", "padded", "share"),
    [(1, 1, 0.3), (12, 12, 0.3), (13, 32, 0.8), (32, 32, 0.8), (33, 64, 0.8), (512, 512, 0.8)],
)
def test_a_gpu_multiplies_few_rows_as_vectors_and_more_as_tiles(
    mixture: CostModel, rows: int, padded: int, share: float
) -> None:
    read, computed = 4.5 / 8 / 0.9 / 100e9, 2 * padded / share / 10e12
    assert mixture._dense_s(1e9, rows) == pytest.approx(1e9 * max(read, computed), rel=1e-4)


def test_a_gpu_begins_commands_and_buffers(qwen3_4b: ModelShape) -> None:
    assert cost_of(qwen3_4b).commands(8) == (10 + 9 * 36, 0)
    waiting, beside = cost_of(qwen3_4b).commands(9)
    assert (waiting, beside) == (10 + 12 * 36, 3 * 36)
    rates = Rates(command_s=1e-6, buffer_s=1e-4, buffer_commands=250)
    seconds = cost_of(qwen3_4b, replace(DEVICE, rates=rates)).step_seconds([(1000, 9)])
    without = cost_of(qwen3_4b).step_seconds([(1000, 9)]) - 0.001
    assert seconds - without == pytest.approx((waiting + 0.4 * beside) * 1e-6 + 3e-4, rel=1e-3)


def test_rotated_inputs_have_commands(tmp_path: Path) -> None:
    """Four in each layer, and those of the embedding and of the head."""
    bonsai, plain = (in_four_bits(tmp_path, name) for name in ("Bonsai-2-27B", "Qwen3.6-27B"))
    assert sum(bonsai.commands(9)) - sum(plain.commands(9)) == 4 * (4 * 64 + 2)


@pytest.mark.parametrize("start", [0, 30_000])
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "Qwen3.5-4B", "Qwen3.6-27B"])
@pytest.mark.parametrize("name", ["M1", "M4 Max", "M5 Max"])
def test_a_step_takes_as_many_tiles_as_its_time_allows(
    tmp_path: Path, model: str, name: str, start: int
) -> None:
    cost = in_four_bits(tmp_path, model, chip(name))
    tile, tokens = cost.device.rates.tile_rows, cost.prompt_tokens(0.5, 2048, start)
    assert tokens % tile == 0
    assert tokens == tile or cost.step_seconds([(start, tokens)]) <= 0.5
    assert tokens == 2048 or cost.step_seconds([(start, tokens + tile)]) > 0.5
    assert (cost.prompt_tokens(0, 2048), cost.prompt_tokens(1e9, 2048)) == (tile, 2048)
    assert cost.prompt_tokens(1e9, 20) == 20


@pytest.mark.parametrize(
    ("model", "name", "context", "measured"),
    [
        ("Qwen3-4B", "M4 Max", 2112, 134.5),  # mlx-lm's BENCHMARKS.md
        ("Qwen3-30B-A3B", "M4 Max", 2112, 113.0),
        ("Qwen3-4B", "M3 Pro", 2112, 44.6),  # mlx-lm#1569
        ("Qwen3-4B", "M5 Max", 576, 186.0),  # mlxcel's sweep of mlx-lm
        ("Qwen3-4B", "M1 Ultra", 576, 116.2),
        ("Qwen3.6-27B", "M3 Ultra", 300, 36.5),  # Rapid-MLX#159
        ("Qwen3.6-35B-A3B", "M4 Max", 1000, 101.6),  # claude-code-local#31
        ("Qwen3.6-35B-A3B", "M1 Ultra", 500, 91.4),  # vllm-metal#637
        ("Qwen3.6-35B-A3B", "M2 Pro", 300, 49.0),  # llmfit#1031
        ("Qwen3.6-35B-A3B", "M5 Max", 1500, 133.5),  # Mac-MLX#24
    ],
)
def test_a_chat_is_about_as_fast_as_others_have_measured(
    tmp_path: Path, model: str, name: str, context: int, measured: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With MLX's own products in 4 bits, and as many commands as quire has with them, where pairs
    are not sorted. mlx-lm has more."""
    others = {"FEW_ROWS": 0, "has_few_pairs": lambda *_: False, "MANY_PAIRS": (16, 5)}
    for its, value in others.items():
        monkeypatch.setattr(f"engine.planning.cost.{its}", value)
    cost = in_four_bits(tmp_path, model, chip(name))
    assert 0.9 < 1 / cost.step_seconds([(context - 1, 1)]) / measured < 1.35
