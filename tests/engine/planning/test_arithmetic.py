"""The figures that Qwen3-4B is known by.

Published figures say "GB" and mean 2**30 bytes. They take the 4.0 billion parameters of the name
plate (it has 4.022), and what reproduces them all are rules of thumb for packed numbers: a weight
is 1 byte in q8 and 0.6 in q4, a number of K or V 1 byte and half a byte. With MLX's real groups,
which have a scale and a bias, and the real parameters, some differ by up to 0.3; both are here.
"""

from dataclasses import replace

import pytest

from engine.models.config import Quantization
from engine.planning.arithmetic import (
    BF16,
    CONTEXTS,
    Q4,
    Q8,
    Packing,
    affine,
    kv_bytes_per_token,
    own_packing,
    resident,
    weights_bytes,
)
from engine.planning.shape import ModelShape

KIB = 1024
GIB = 1024**3
THUMB_Q8, THUMB_Q4 = Packing("q8", 8), Packing("q4", 4.8)
THUMB_KV8, THUMB_KV4 = Packing("q8", 8), Packing("q4", 4)


def gib(amount: int) -> float:
    return round(amount / GIB, 1)


@pytest.fixture(scope="module")
def name_plate(qwen3_4b: ModelShape) -> ModelShape:
    """The model with its parameters rounded to a tenth of a billion, as people quote them."""
    quoted = round(qwen3_4b.parameters, -8)
    assert quoted == 4_000_000_000
    return replace(qwen3_4b, matrix_numbers=quoted, vector_numbers=0)


def test_a_token_of_qwen3_4b_costs_144_kib(qwen3_4b: ModelShape) -> None:
    assert kv_bytes_per_token(qwen3_4b, BF16) == 144 * KIB


def test_32k_tokens_of_qwen3_4b_cost_4_5_gib(qwen3_4b: ModelShape) -> None:
    assert resident(qwen3_4b, BF16, BF16, 32 * KIB).kv_bytes == 4.5 * GIB


def test_the_published_resident_sizes_by_context(name_plate: ModelShape) -> None:
    sizes = [gib(resident(name_plate, BF16, BF16, tokens).total_bytes) for tokens in CONTEXTS]
    assert tuple(KIB * n for n in (2, 4, 8, 16, 32, 64, 128)) == CONTEXTS
    assert sizes == [7.7, 8.0, 8.6, 9.7, 12.0, 16.5, 25.5]


def test_the_resident_sizes_by_context_with_every_parameter(qwen3_4b: ModelShape) -> None:
    sizes = [gib(resident(qwen3_4b, BF16, BF16, tokens).total_bytes) for tokens in CONTEXTS]
    assert sizes == [7.8, 8.1, 8.6, 9.7, 12.0, 16.5, 25.5]


def test_the_published_sizes_by_quantisation(name_plate: ModelShape) -> None:
    steps = [
        (BF16, BF16),
        (THUMB_Q8, BF16),
        (THUMB_Q4, BF16),
        (THUMB_Q4, THUMB_KV8),
        (THUMB_Q4, THUMB_KV4),
    ]
    sizes = [gib(resident(name_plate, *step, 32 * KIB).total_bytes) for step in steps]
    assert sizes == [12.0, 8.2, 6.7, 4.5, 3.4]


def test_the_sizes_by_quantisation_in_mlx_own_groups(qwen3_4b: ModelShape) -> None:
    steps = [(BF16, BF16), (Q8, BF16), (Q8, Q8), (Q4, BF16), (Q4, Q8), (Q4, Q4)]
    sizes = [gib(resident(qwen3_4b, *step, 32 * KIB).total_bytes) for step in steps]
    assert sizes == [12.0, 8.5, 6.4, 6.6, 4.5, 3.4]


def test_k_and_v_in_8_bits_cost_their_scales_too(qwen3_4b: ModelShape) -> None:
    assert kv_bytes_per_token(qwen3_4b, Q8) == 76.5 * KIB
    assert kv_bytes_per_token(qwen3_4b, Q4) == 40.5 * KIB


def test_a_group_adds_a_scale_and_a_bias() -> None:
    assert (Q8.name, Q8.bits) == ("q8", 8.5)
    assert (Q4.name, Q4.bits) == ("q4", 4.5)
    assert affine(4, 32).bits == 5
    assert Q4.bytes_of(64) == 32 + 4


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
        (Quantization(4, 32, "mxfp4"), "mxfp4", 4.25, 9.0),
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
