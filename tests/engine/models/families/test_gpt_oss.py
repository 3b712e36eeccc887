"""gpt-oss is read as MLX's tools and as the hub write it, and its logits are mlx-lm's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.models.checkpoint import Checkpoint, promised_checkpoint, read_checkpoint
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Gate
from tests.engine.models.forwards import ours, prompt, spread
from tests.engine.models.hybrids import (
    assert_chunks_change_no_bit,
    logits_in_chunks_and_company,
    write_hybrid,
)
from tests.families import GPT_OSS
from tests.models import SMALL, write_config
from tests.reference import logits_of

SPEC = replace(SMALL, head_dim=64, intermediate_size=96)
TOLERANCE = 2e-4
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["MLX", "packed"])
MXFP4: dict[str, Any] = {"bits": 4, "mode": "mxfp4"}
AFFINE: dict[str, Any] = {"bits": 4, "layers": {"mlp.router": {"bits": 8, "group_size": 64}}}


def written(folder: Path, **how: Any) -> Checkpoint:
    return read_checkpoint(write_hybrid(folder, SPEC, **({"dtype": "float32"} | GPT_OSS | how)))


@BOTH
@pytest.mark.parametrize("how", [{}, MXFP4, AFFINE, {"hub": True}], ids=str)
def test_logits_equal_mlx_lms_by_chunks_and_in_company(
    tmp_path: Path, how: dict[str, Any], packed: bool
) -> None:
    checkpoint = written(tmp_path, **how)
    model, ids, other = ours(checkpoint, packed=packed), prompt(200), prompt(30, 1)
    logits, beside = logits_in_chunks_and_company(checkpoint, model, ids, other)
    assert spread(logits, logits_of(checkpoint, ids)) < TOLERANCE
    assert spread(beside, logits_of(checkpoint, other)) < TOLERANCE


def test_what_is_computed_does_not_depend_on_chunks_bit_by_bit(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, **MXFP4)
    assert_chunks_change_no_bit(checkpoint, ours(checkpoint))


def test_the_hubs_blocks_are_the_same_weights_as_mlxs(tmp_path: Path) -> None:
    hub = written(tmp_path / "hub", hub=True)
    of_experts = [name for name in hub.packings if ".experts." in name]
    assert len(of_experts) == 2 * SPEC.num_hidden_layers
    assert of_experts == list(hub.packings)
    assert {packing.mode for packing in hub.packings.values()} == {"mxfp4"}
    mlx = written(tmp_path / "mlx", **MXFP4)
    assert hub.spec == mlx.spec
    assert hub.num_weights == mlx.num_weights
    for whole in (hub, mlx):  # what is promised without the weights
        (whole.path / "model.safetensors").unlink()
        promised = promised_checkpoint(whole.path, whole.stored_bytes)
        assert promised.packed_bytes == whole.packed_bytes
        assert promised.num_weights == whole.num_weights


def test_layers_have_sinks_biases_and_in_turn_a_window(tmp_path: Path) -> None:
    spec = read_spec(ModelConfig(write_config(tmp_path, SPEC, **GPT_OSS)))
    assert [its.window for its in spec.attentions] == [40, None, 40, None]
    assert all(its.sinks and its.qkv_bias and its.output_bias for its in spec.attentions)
    assert {its.rope.magnitude for its in spec.attentions} == {0.1 * np.log(32) + 1}
    (mixture,) = {layer.mlp for layer in spec.layers}
    assert mixture.gate is Gate.CLAMPED_SILU
    assert spec.max_position_embeddings == 40960
    assert not spec.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 3.0}, "swiglu_limit is 3.0; it must be None or 7.0"),
        ({"attention_bias": False}, "attention_bias is False; it must be None or True"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than num_local_expe"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_config(tmp_path, SPEC, **(GPT_OSS | changes))
    with pytest.raises(CheckpointError, match=message):
        read_spec(ModelConfig(folder))


def test_experts_that_nobody_quantized_for_the_hub_are_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, hub=True)
    file = str(tmp_path / "model.safetensors")
    weights: dict[str, mx.array] = mx.load(file)  # type: ignore[assignment]
    kept = {name: each for name, each in weights.items() if not name.endswith("_scales")}
    kept = {name.removesuffix("_blocks"): each for name, each in kept.items()}
    mx.eval(kept)
    mx.save_safetensors(file, kept, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"experts\.gate_up_proj is not quantized; quire serv"
    ):
        read_checkpoint(tmp_path)
