from dataclasses import replace

import pytest

from engine.planning.arithmetic import BF16, Q4, weights_bytes
from engine.planning.cost import CostModel
from engine.planning.devices import CPU, Device
from engine.planning.shape import ModelShape

DEVICE = replace(CPU, bytes_per_s=100e9, ops_per_s=10e12, step_overhead_s=0.001)
KV_BYTES = 144 * 1024


def cost_of(shape: ModelShape, device: Device = DEVICE) -> CostModel:
    return CostModel.of(shape, device, BF16, BF16)


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
    packed = CostModel.of(qwen3_4b, DEVICE, Q4, BF16)
    assert packed.weights_bytes == weights_bytes(qwen3_4b, Q4)
    assert packed.step_seconds([(0, 1)]) < 0.35 * cost_of(qwen3_4b).step_seconds([(0, 1)])
