"""From a checkpoint's layers to packed ones."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import metal_ext
from engine.checkpoint import read_checkpoint
from engine.packed_weights import pack_linear, pack_qwen3
from engine.weights import lazy_reference
from tests.models import ModelSpec, write_model

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


def unpacked(packed: metal_ext.PackedLinear) -> np.ndarray:
    """All rows of a layer, as they are multiplied."""
    return np.array(metal_ext.packed_rows(mx.arange(packed.outputs), packed, WORKERS))


def test_plain_layers_become_one_in_their_order() -> None:
    layers = [nn.Linear(40, outputs, bias=False) for outputs in (32, 16, 7)]
    packed = pack_linear(layers, WORKERS)
    assert (packed.outputs, packed.inputs) == (55, 40)
    want = np.concatenate([np.array(layer.weight) for layer in layers])
    assert np.array_equal(unpacked(packed), want)


@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_layers_become_one_in_their_order(bits: int) -> None:
    layers = [nn.Linear(64, outputs, bias=False) for outputs in (16, 9)]
    grouped = [layer.to_quantized(group_size=32, bits=bits) for layer in layers]
    want = [mx.dequantize(g.weight, g.scales, g.biases, 32, bits) for g in grouped]
    got = unpacked(pack_linear(grouped, WORKERS))
    np.testing.assert_allclose(got, np.array(mx.concatenate(want)), rtol=1e-6, atol=1e-7)


def test_an_embedding_is_packed_as_a_layer_is() -> None:
    embedding = nn.Embedding(21, 32)
    assert np.array_equal(unpacked(pack_linear([embedding], WORKERS)), np.array(embedding.weight))


def test_layers_that_cannot_be_one_are_told() -> None:
    plain = nn.Linear(64, 16, bias=False)
    grouped = plain.to_quantized(group_size=32, bits=4)
    with pytest.raises(ValueError, match=r"some of the layers are packed .* and some are not"):
        pack_linear([plain, grouped], WORKERS)
    with pytest.raises(ValueError, match="differ in inputs or in how they are stored"):
        pack_linear([grouped, plain.to_quantized(group_size=64, bits=4)], WORKERS)
    with pytest.raises(ValueError, match="do not fill its last panel"):
        pack_linear([nn.Linear(64, 15, bias=False), plain], WORKERS)
    pack_linear([plain, plain], WORKERS)


def test_weights_are_there_twice_for_one_layer_only(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, EVEN, dtype="bfloat16"))
    sizes: list[int] = []
    model = lazy_reference(checkpoint)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pack_qwen3(model, WORKERS, sizes.append)
    # The model's own weights, as MLX reads them; the packed ones lie elsewhere.
    layer_bytes = sum(sizes[2:]) // EVEN.num_hidden_layers
    assert layer_bytes <= mx.get_peak_memory() - before < 2 * layer_bytes
    assert mx.get_active_memory() - before < layer_bytes // 4, "only norms are left"


def test_every_layers_bytes_are_told_once(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path, dtype="bfloat16"))
    sizes: list[int] = []
    pack_qwen3(lazy_reference(checkpoint), WORKERS, sizes.append)
    assert len(sizes) == 1 + 4 * checkpoint.num_layers
    assert all(size > 0 for size in sizes)
