"""Packed layers: what they hold, and the forward over them against mlx-lm's own, and against itself
in other company."""

from collections.abc import Callable
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
from engine.models.weights import Arithmetic, read_weights
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
    ],
)
def test_logits_equal_mlx_lms_in_float32(
    tmp_path: Path, how: dict[str, Any], instruction_set: str
) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, **how))
    # Not unpacked: that rounds to the checkpoint's own 16 bits.
    reference = load_reference(checkpoint, Arithmetic.QUANTIZED_FLOAT32)
    kv, ids = cache_for(checkpoint, KVFormat.FLOAT32), prompt(90)
    assert join(kv, 1, 90)
    model = ours(checkpoint, Arithmetic.PACKED, instruction_set)
    got = [step(model, kv, [(1, 0, ids[:70])], list(range(70)))]
    got += [step(model, kv, [(1, 70 + i, [ids[70 + i]])], [0]) for i in range(20)]
    assert spread(mx.concatenate(got), reference(mx.array([ids]))[0]) < TOLERANCE


@pytest.mark.parametrize("instruction_set", metal_ext.instruction_sets())
def test_an_id_outside_of_the_vocabulary_spoils_its_own_sequence_alone(
    tmp_path: Path, instruction_set: str
) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, SPEC, dtype="bfloat16"))
    model, ids = ours(checkpoint, Arithmetic.PACKED, instruction_set), prompt(40)

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
    model = ours(checkpoint, Arithmetic.PACKED)
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
    packing = Quantization(module.bits, module.group_size)
    return StoredMatrix(module.weight, module.scales, module.biases, packing)


def pack(checkpoint: Checkpoint, packed: Callable[[int], None]) -> CpuOps:
    weights = read_weights(checkpoint, Arithmetic.PACKED)
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


@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_layers_become_one_in_their_order(bits: int) -> None:
    layers = [nn.Linear(64, outputs, bias=False) for outputs in (16, 9)]
    grouped = [layer.to_quantized(group_size=32, bits=bits) for layer in layers]
    want = [mx.dequantize(g.weight, g.scales, g.biases, 32, bits) for g in grouped]
    got = unpacked(pack_linear([stored(layer) for layer in grouped], WORKERS))
    np.testing.assert_allclose(got, np.array(mx.concatenate(want)), rtol=1e-6, atol=1e-7)


def test_an_embedding_is_packed_as_a_layer_is() -> None:
    embedding = nn.Embedding(21, 32)
    packed = pack_linear([stored(embedding)], WORKERS)
    assert np.array_equal(unpacked(packed), np.array(embedding.weight))


def test_layers_that_cannot_be_one_are_told() -> None:
    layer = nn.Linear(64, 16, bias=False)
    plain, short = stored(layer), stored(nn.Linear(64, 15, bias=False))
    grouped, other = (stored(layer.to_quantized(size, 4)) for size in (32, 64))
    with pytest.raises(ValueError, match=r"some of the layers are packed .* and some are not"):
        pack_linear([plain, grouped], WORKERS)
    with pytest.raises(ValueError, match="differ in inputs or in how they are stored"):
        pack_linear([grouped, other], WORKERS)
    with pytest.raises(ValueError, match="do not fill its last panel"):
        pack_linear([short, plain], WORKERS)
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
    assert len(sizes) == 1 + 4 * checkpoint.spec.num_layers
    assert all(size > 0 for size in sizes)
