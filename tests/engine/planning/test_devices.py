from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from engine.planning.devices import (
    CPU,
    DEVICES,
    CostModel,
    Device,
    device_names,
    find_device,
    this_device,
)
from engine.planning.memory import BF16, Q4, ModelShape, read_shape, weights_bytes
from tests.families import PUBLISHED


@pytest.mark.parametrize("name", ["M4 Pro", "m4-pro", "Apple M4 Pro"])
def test_a_device_is_found_however_it_is_written(name: str) -> None:
    device = find_device(name)
    assert device is not None
    assert device.name == "M4 Pro"
    assert device.bytes_per_s == 273e9


def test_an_unknown_device_is_nobody() -> None:
    assert find_device("M4 Prodigy") is None
    assert find_device("") is None


def test_every_name_is_there_once() -> None:
    assert len(set(device_names())) == len(DEVICES)


def test_estimated_rates_are_near_the_quoted_ones() -> None:
    """Teraflops that are widely quoted for the GPUs (float32)."""
    quoted = {"M1": 2.6, "M1 Max": 10.4, "M1 Ultra": 20.8, "M2": 3.6, "M2 Max": 13.6}
    for name, teraflops in quoted.items():
        device = find_device(name)
        assert device is not None
        assert device.ops_per_s == pytest.approx(teraflops * 1e12, rel=0.03)


@pytest.mark.parametrize(
    ("memory_gib", "working_set_mib"),
    [(16, 10922), (24, 16384), (32, 21845), (36, 27648), (64, 49152), (96, 73728)],
)
def test_a_gpu_may_use_what_public_logs_show(memory_gib: int, working_set_mib: int) -> None:
    for device in DEVICES:
        found = device.working_set_bytes(memory_gib << 30) >> 20
        assert found == (memory_gib << 10 if device is CPU else working_set_mib)


@pytest.mark.parametrize(
    ("name", "memory_gib", "gigabytes_per_s"),
    [
        ("M5", 16, 153),
        ("M5 Pro", 48, 307),
        ("M5 Max", 36, 460),
        ("M5 Max", 128, 614),
        ("M5 Ultra", 256, 1200),
        ("M6", 16, 153),
        ("M6", 32, 170),
        ("M4 Max", 36, 410),
        ("M4 Max", 48, 546),
        ("M3 Max", 36, 300),
    ],
)
def test_a_mac_reads_as_fast_as_the_chip_that_comes_with_its_memory(
    name: str, memory_gib: int, gigabytes_per_s: int
) -> None:
    """Apple sells some memory sizes with a smaller chip of the same name only."""
    device = find_device(name)
    assert device is not None
    assert device.with_memory(memory_gib << 30).bytes_per_s == gigabytes_per_s * 1e9
    assert device.with_memory(memory_gib << 30).name == name
    assert device.ops_per_s >= device.with_memory(memory_gib << 30).ops_per_s


def test_this_device_is_the_one_that_mlx_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M2 Max"})
    assert this_device().name == "M2 Max"
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Intel(R) Xeon(R) Processor"})
    assert this_device() is CPU


DEVICE = replace(CPU, bytes_per_s=100e9, ops_per_s=10e12, step_overhead_s=0.001)
KV_BYTES = 144 * 1024


def cost_of(shape: ModelShape, device: Device = DEVICE) -> CostModel:
    return CostModel.of(shape, device, BF16)


def test_one_decoded_token_takes_the_time_to_read_weights_and_cache(qwen3_4b: ModelShape) -> None:
    read = weights_bytes(qwen3_4b, BF16) + KV_BYTES * (1000 + 2)
    assert cost_of(qwen3_4b).step_seconds([(1000, 1)]) == pytest.approx(0.001 + read / 100e9)


def test_weights_are_read_once_for_all_sequences_of_a_step(qwen3_4b: ModelShape) -> None:
    cost = cost_of(qwen3_4b)
    more = cost.step_seconds([(1000, 1)] * 8) - cost.step_seconds([(1000, 1)])
    assert more == pytest.approx(7 * 1002 * KV_BYTES / 100e9)


def test_a_chunk_of_a_prompt_takes_the_time_of_its_operations(qwen3_4b: ModelShape) -> None:
    embedding = qwen3_4b.spec.vocab_size * qwen3_4b.spec.hidden_size
    ops = 512 * 2 * (qwen3_4b.matrix_numbers - embedding) + 2 * embedding
    ops += 4 * 36 * 32 * 128 * (512 * 100 + 512 * 513 // 2)
    assert cost_of(qwen3_4b).step_seconds([(100, 512)]) == pytest.approx(0.001 + ops / 10e12)


def test_an_embedding_that_is_only_looked_up_costs_nothing(qwen3_4b: ModelShape) -> None:
    embedding = qwen3_4b.spec.vocab_size * qwen3_4b.spec.hidden_size
    untied = replace(
        qwen3_4b,
        spec=replace(qwen3_4b.spec, tied_embeddings=False),
        matrix_numbers=qwen3_4b.matrix_numbers + embedding,
    )
    assert cost_of(untied) == cost_of(qwen3_4b)


def test_packed_weights_are_read_faster(qwen3_4b: ModelShape) -> None:
    packed = CostModel.of(qwen3_4b, DEVICE, Q4)
    assert packed.weights_bytes == weights_bytes(qwen3_4b, Q4)
    assert packed.step_seconds([(0, 1)]) < 0.35 * cost_of(qwen3_4b).step_seconds([(0, 1)])


def test_of_experts_a_step_reads_those_that_its_tokens_choose(tmp_path: Path) -> None:
    """Qwen3-30B-A3B, whose figures are 30.5 billion parameters and 3.3 that are active."""
    shape = read_shape(PUBLISHED["Qwen3-30B-A3B"].write(tmp_path))
    assert shape.parameters == pytest.approx(30.53e9, rel=1e-3)
    cost = CostModel.of(shape, DEVICE, Q4)
    embedding = shape.spec.vocab_size * shape.spec.hidden_size
    assert cost.ops_per_token / 2 + 2 * embedding == pytest.approx(3.35e9, rel=1e-2)
    # 8 of 128 experts of 3 x 768 x 2048 in 48 layers, in 4.5 bits; all of them at last.
    expert = 48 * 3 * 768 * 2048 * 4.5 / 8
    assert cost.weights_read(1) == pytest.approx(1.72e9, rel=0.02)
    assert cost.weights_read(1) - cost.weights_bytes == pytest.approx(8 * expert)
    assert cost.weights_read(4) == pytest.approx(4.41e9, rel=0.02)
    assert cost.weights_read(8) == pytest.approx(7.27e9, rel=0.02)
    assert cost.weights_read(1000) == pytest.approx(weights_bytes(shape, Q4), rel=0.02)
    more = cost.step_seconds([(0, 1)] * 2) - cost.step_seconds([(0, 1)])
    read = cost.weights_read(2) - cost.weights_read(1) + 2 * cost.kv_bytes_per_token
    assert more == pytest.approx(read / 100e9)


@pytest.mark.parametrize(
    ("model", "parameters", "state_mib", "kv_kib", "one_row", "four_rows"),
    [
        ("Qwen3.6-27B", 26.9e9, 146.8, 64, 14.5e9, 14.5e9),
        ("Qwen3.6-35B-A3B", 34.7e9, 61.4, 20, 1.67e9, 3.26e9),
    ],
)
def test_states_are_read_and_written_whatever_the_length(
    tmp_path: Path,
    model: str,
    parameters: float,
    state_mib: float,
    kv_kib: int,
    one_row: float,
    four_rows: float,
) -> None:
    """A matrix of float32 and three rows for each value head, in three of four layers."""
    shape = read_shape(PUBLISHED[model].write(tmp_path))
    assert shape.parameters == pytest.approx(parameters, rel=3e-3)
    cost = CostModel.of(shape, DEVICE, Q4)
    assert cost.state_bytes / 1024**2 == pytest.approx(state_mib, rel=1e-2)
    assert cost.kv_bytes_per_token == kv_kib * 1024
    assert cost.weights_read(1) == pytest.approx(one_row, rel=0.02)
    assert cost.weights_read(4) == pytest.approx(four_rows, rel=0.02)
    read = cost.weights_read(1) + 2 * cost.state_bytes + 1002 * cost.kv_bytes_per_token
    assert cost.step_seconds([(1000, 1)]) == pytest.approx(0.001 + read / 100e9)
