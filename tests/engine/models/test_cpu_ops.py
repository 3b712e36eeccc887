"""Packed layers: what they hold, and the forward over them against mlx-lm's own, and against itself
in other company."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import metal_ext
from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.config import Quantization
from engine.models.cpu_ops import CpuOps, pack_linear
from engine.models.stored import StoredMatrix
from engine.models.weights import read_weights
from kvcache.layout import KVFormat
from tests.engine.models.forwards import SPEC, cache_for, ours, prompt, spread, step
from tests.engine.models.test_forward import LLAMA3
from tests.kvcache.managers import join
from tests.models import ModelSpec, write_model
from tests.reference import load_reference

WORKERS = metal_ext.CpuWorkers(2)
# Layers of equal size, and an embedding and a head as large as a layer.
EVEN = ModelSpec(
    num_hidden_layers=6,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=512,
    vocab_size=2560,
    tie_word_embeddings=False,
)
# Of the logits' standard deviation: float32 against float32 in another order, x in two bfloat16
# parts where a matrix unit multiplies.
TOLERANCE = 1e-4
# As mlx-lm mixes: values and what goes down have more bits than others. And as nobody does.
MIXED: dict[str, dict[str, Any] | bool] = {
    "v_proj": {"bits": 6, "group_size": 64},
    "down_proj": {"bits": 5, "group_size": 128},
    "0.self_attn.k_proj": False,
    "0.mlp.up_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "1.mlp.up_proj": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "embed_tokens": {"bits": 8, "group_size": 32},
}


@pytest.mark.parametrize("instruction_set", metal_ext.instruction_sets())
@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "bits": 4},
        {"dtype": "bfloat16", "bits": 8, "group_size": 64},
        {"dtype": "float16", "bits": 4, "group_size": 128},
        {"dtype": "bfloat16", "bits": 3, "group_size": 64},
        {"dtype": "bfloat16", "bits": 6, "group_size": 128},
        {"dtype": "bfloat16", "bits": 4, "mode": "mxfp4"},
        {"dtype": "bfloat16", "bits": 4, "group_size": 16, "mode": "nvfp4"},
        {"dtype": "float16", "bits": 8, "mode": "mxfp8"},
        {"dtype": "bfloat16", "bits": 2, "layers": MIXED},
    ],
)
def test_logits_equal_mlx_lms_in_float32(
    tmp_path: Path, how: dict[str, Any], instruction_set: str
) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, **how))
    reference = load_reference(checkpoint)
    kv, ids = cache_for(checkpoint, KVFormat.FLOAT32), prompt(90)
    assert join(kv, 1, 90)
    model = ours(checkpoint, instruction_set)
    got = [step(model, kv, [(1, 0, ids[:70])], list(range(70)))]
    got += [step(model, kv, [(1, 70 + i, [ids[70 + i]])], [0]) for i in range(20)]
    assert spread(mx.concatenate(got), reference(mx.array([ids]))[0]) < TOLERANCE


@pytest.mark.parametrize("instruction_set", metal_ext.instruction_sets())
def test_an_id_outside_of_the_vocabulary_spoils_its_own_sequence_alone(
    tmp_path: Path, instruction_set: str
) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, dtype="bfloat16"))
    model, ids = ours(checkpoint, instruction_set), prompt(40)

    def last_logits(*others: list[int]) -> mx.array:
        kv = cache_for(checkpoint, KVFormat.BFLOAT16)
        plan = [(number, 0, its) for number, its in enumerate((ids, *others), 1)]
        for number, _, _ in plan:
            assert join(kv, number, 60)
        return step(model, kv, plan, [40 * i + 39 for i in range(len(plan))])

    spoilt = [*ids[:20], checkpoint.vocab_size, *ids[21:]]
    good, bad = last_logits(spoilt)
    assert mx.isnan(bad).all().item()
    assert mx.array_equal(good, last_logits()[0]).item()


@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen2", "architectures": [], "rope_scaling": LLAMA3}],
    ids=["norms", "biases and no norms"],
)
def test_a_row_has_the_same_bits_in_any_company(tmp_path: Path, changes: dict[str, Any]) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, dtype="bfloat16", **changes))
    model = ours(checkpoint)
    ids = {number: prompt(40, seed=number) for number in range(1, 6)}

    def last_logits(numbers: list[int]) -> np.ndarray[Any, Any]:
        kv = cache_for(checkpoint, KVFormat.BFLOAT16)
        for number in numbers:
            assert join(kv, number, 60)
        rows = [40 * i + 39 for i in range(len(numbers))]
        return np.array(step(model, kv, [(n, 0, ids[n]) for n in numbers], rows))

    together = last_logits(list(ids))
    for row, number in enumerate(ids):
        assert np.array_equal(together[row], last_logits([number])[0])


# --- packing ------------------------------------------------------------------------------------


def stored(module: Any) -> StoredMatrix:
    """A layer of MLX's, as a checkpoint has it."""
    if not hasattr(module, "scales"):
        return StoredMatrix(module.weight)
    packing = Quantization(module.bits, module.group_size, module.mode)
    return StoredMatrix(module.weight, module.scales, module.get("biases"), packing)


def pack(checkpoint: Checkpoint, packed: Callable[[int], None]) -> CpuOps:
    weights = read_weights(checkpoint)
    return CpuOps(checkpoint.spec, checkpoint.tensors, weights, WORKERS, packed)


def unpacked(packed: metal_ext.PackedLinear) -> np.ndarray:
    """All rows of a layer, as they are multiplied."""
    return np.array(metal_ext.packed_rows(mx.arange(packed.outputs), packed, WORKERS))


def test_plain_layers_become_one_in_their_order() -> None:
    layers = [nn.Linear(40, outputs, bias=False) for outputs in (32, 16, 7)]
    packed = pack_linear([stored(layer) for layer in layers], WORKERS)
    assert (packed.outputs, packed.inputs) == (55, 40)
    want = np.concatenate([np.array(layer.weight) for layer in layers])
    assert np.array_equal(unpacked(packed), want)


# What MLX stores, and of which bits and groups a CPU keeps it: codes, or plain numbers of 16 bits.
STORED = [(Quantization(bits, 32), 4) for bits in (1, 2, 3, 4)]
STORED += [(Quantization(bits, 64), 8) for bits in (5, 6, 8)]
STORED += [(Quantization(4, 32, "mxfp4"), 4)]
STORED += [(Quantization(8, 32, "mxfp8"), 16), (Quantization(4, 16, "nvfp4"), 16)]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize(("packing", "bits"), STORED, ids=str)
def test_grouped_layers_become_one_in_their_order(
    packing: Quantization, bits: int, dtype: mx.Dtype
) -> None:
    matrices = [grouped(packing, outputs, dtype) for outputs in (16, 9)]
    packed = pack_linear(matrices, WORKERS)
    want = np.concatenate([exactly(matrix) for matrix in matrices])
    np.testing.assert_allclose(unpacked(packed), want, rtol=1e-6, atol=1e-7)
    scales = 4 if dtype == mx.bfloat16 else 8
    scales = {"affine": scales, "mxfp4": 1}.get(packing.mode, 0)
    assert packed.nbytes == 32 * (128 * bits // 8 + 128 // packing.group_size * scales)


@pytest.mark.parametrize("kinds", list(itertools.combinations([*range(len(STORED)), -1], 2)))
def test_layers_that_are_stored_in_different_ways_become_one(kinds: tuple[int, int]) -> None:
    plain = StoredMatrix(mx.random.normal((9, 128)).astype(mx.bfloat16))
    matrices = [plain if kind < 0 else grouped(STORED[kind][0], 9, mx.bfloat16) for kind in kinds]
    want = np.concatenate([exactly(matrix) for matrix in matrices])
    got = unpacked(pack_linear(matrices, WORKERS))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def grouped(packing: Quantization, outputs: int, dtype: mx.Dtype) -> StoredMatrix:
    plain = (3 * mx.random.normal((outputs, 128), key=mx.random.key(outputs))).astype(dtype)
    bits, size, mode = packing.bits, packing.group_size, packing.mode
    weight, scales, *biases = mx.quantize(plain, size, bits, mode)
    return StoredMatrix(weight, scales, biases[0] if biases else None, packing)


def exactly(matrix: StoredMatrix) -> np.ndarray:
    """A layer's numbers, in float32: MLX's own, from scales as wide."""
    if matrix.biases is None:
        return np.array(matrix.dequantized().astype(mx.float32))
    assert matrix.scales is not None
    scales, biases = (its.astype(mx.float32) for its in (matrix.scales, matrix.biases))
    return np.array(replace(matrix, scales=scales, biases=biases).dequantized())


def test_an_embedding_is_packed_as_a_layer_is() -> None:
    embedding = nn.Embedding(21, 32)
    packed = pack_linear([stored(embedding)], WORKERS)
    assert np.array_equal(unpacked(packed), np.array(embedding.weight))


def test_layers_that_cannot_be_one_are_told() -> None:
    plain, short = (StoredMatrix(mx.zeros((16, inputs))) for inputs in (64, 32))
    with pytest.raises(ValueError, match="its parts differ in inputs"):
        pack_linear([plain, short], WORKERS)
    pack_linear([plain, plain], WORKERS)


def test_weights_are_there_twice_for_one_layer_only(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, EVEN, dtype="bfloat16"))
    sizes: list[int] = []
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ops = pack(checkpoint, sizes.append)
    # The model's own weights, as MLX reads them; the packed ones lie elsewhere.
    layer_bytes = sum(sizes[2:]) // EVEN.num_hidden_layers
    assert layer_bytes <= mx.get_peak_memory() - before < 2 * layer_bytes
    assert mx.get_active_memory() - before < layer_bytes // 4, "only norms are left"
    assert list(ops.weights) == []


def test_every_layers_bytes_are_told_once(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, dtype="bfloat16"))
    sizes: list[int] = []
    pack(checkpoint, sizes.append)
    assert len(sizes) == 1 + 4 * len(checkpoint.spec.layers)
    assert all(size > 0 for size in sizes)
