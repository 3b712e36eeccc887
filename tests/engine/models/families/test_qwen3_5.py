"""A Qwen3.5 is read as MLX's tools and as the hub write it, and its logits are mlx-lm's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.config import ModelConfig
from engine.models.families.qwen3_5 import qwen3_5
from engine.models.safetensors_headers import CheckpointError
from engine.models.spec import Attention, GatedDeltaNet
from kvcache.layout import KVFormat, StateSpec
from tests.engine.models.forwards import ours, prompt, spread
from tests.engine.models.hybrids import (
    FIELDS,
    MIXED,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    SPEC,
    Steps,
    assert_chunks_change_no_bit,
    logits_in_chunks_and_company,
    write_hybrid,
)
from tests.models import write_config
from tests.reference import logits_of

# Of float32 in another order, and what experts' routers and recurrent states make of it.
TOLERANCE = 2e-4
BOTH = pytest.mark.parametrize("packed", [False, True], ids=["MLX", "packed"])


def written(folder: Path, **how: Any) -> Checkpoint:
    return read_checkpoint(write_hybrid(folder, **how))


# --- config.json ---------------------------------------------------------------------------------


def test_every_so_many_th_layer_attends_and_the_others_keep_a_state(tmp_path: Path) -> None:
    spec = qwen3_5(ModelConfig(write_config(tmp_path, SPEC, **FIELDS)))
    kinds = [type(layer.mixer) for layer in spec.layers]
    assert kinds == [GatedDeltaNet, GatedDeltaNet, Attention] * 2
    assert spec.places == [0, 1, 0, 2, 3, 1]
    assert set(spec.recurrences) == {GatedDeltaNet(2, 4, 32, 32, 4)}
    (attention,) = set(spec.attentions)
    assert attention.output_gate
    assert attention.qk_norm
    assert attention.rope.dims == 16
    assert attention.rope.frequencies(64) == pytest.approx([1e7 ** (-i / 8) for i in range(8)])
    shape = spec.kv_shape(KVFormat.BFLOAT16)
    assert len(shape.layers) == 2
    assert shape.states == (StateSpec(2, 4, 32, 32, 3, KVFormat.FLOAT32),) * 4


def test_a_config_may_be_nested_and_leave_out_what_all_have(tmp_path: Path) -> None:
    flat = write_config(tmp_path, SPEC, **FIELDS | {"full_attention_interval": ...})
    spec = qwen3_5(ModelConfig(flat))
    values = json.loads((flat / "config.json").read_text())
    nested = {"model_type": "qwen3_5", "text_config": values, "rms_norm_eps": 7}
    (flat / "config.json").write_text(json.dumps(nested))
    assert qwen3_5(ModelConfig(flat)) == spec
    assert [type(layer.mixer) for layer in spec.layers].index(Attention) == 3


# --- logits --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "bits": 4},
        {"dtype": "float32", "hub": True},
        {"dtype": "float32", "hub": True, "linear_num_value_heads": 2, "linear_value_head_dim": 48},
        {"dtype": "float32", "hub": True} | QWEN3_5_MOE,
        {"dtype": "float32", "hub": True} | QWEN3_NEXT,
        {"dtype": "float32", "linear_value_head_dim": 48} | MIXED | QWEN3_NEXT,
    ],
    ids=str,
)
def test_logits_equal_mlx_lms_by_chunks_and_in_company(
    tmp_path: Path, how: dict[str, Any], packed: bool
) -> None:
    checkpoint = written(tmp_path, **how)
    model, ids, other = ours(checkpoint, packed=packed), prompt(200), prompt(30, 1)
    logits, beside = logits_in_chunks_and_company(checkpoint, model, ids, other)
    assert spread(logits, logits_of(checkpoint, ids)) < TOLERANCE
    assert spread(beside, logits_of(checkpoint, other)) < TOLERANCE


def test_what_is_computed_does_not_depend_on_chunks_bit_by_bit(tmp_path: Path) -> None:
    checkpoint = written(tmp_path)
    assert_chunks_change_no_bit(checkpoint, ours(checkpoint))


def test_with_no_rows_only_cache_and_states_are_written(tmp_path: Path) -> None:
    spec = replace(SPEC, num_hidden_layers=4)  # the last layer keeps a state
    checkpoint = written(tmp_path, spec=spec)
    model, ids = ours(checkpoint), prompt(50)

    def last(rows: list[int] | None) -> np.ndarray[Any, Any]:
        steps = Steps(checkpoint, model, {1: 50})
        assert (steps.run([(1, 0, ids[:49])], rows) is None) == (rows is None)
        return np.array(steps.run([(1, 49, ids[49:])], [0]))

    assert np.array_equal(last(None), last([48]))


# --- files ---------------------------------------------------------------------------------------


def test_what_text_does_not_need_is_named_and_not_counted(tmp_path: Path) -> None:
    plain = written(tmp_path / "mlx", dtype="float32")
    hub = written(tmp_path / "hub", dtype="float32", hub=True)
    assert not plain.unread
    assert plain.left_out is None
    assert hub.left_out == (
        "Qwen3.5 is served without what its files have for drafts of tokens (1 tensor), "
        "images (1 tensor)"
    )
    assert set(hub.unread) == {"mtp.norm.weight", "model.visual.merger.norm.weight"}
    assert hub.stored_bytes == plain.stored_bytes
    assert hub.packed_bytes == plain.packed_bytes
    assert hub.num_weights == plain.num_weights


def test_an_untied_head_has_its_name_beside_the_model(tmp_path: Path) -> None:
    untied = replace(SPEC, tie_word_embeddings=False)
    for hub, head in ((False, "language_model.lm_head"), (True, "lm_head")):
        checkpoint = written(tmp_path / head, spec=untied, hub=hub)
        assert not checkpoint.embeds
        assert checkpoint.tensors.head is not None
        assert checkpoint.tensors.head.name == head
        steps, ids = Steps(checkpoint, ours(checkpoint), {1: 20}), prompt(20)
        logits = steps.run([(1, 0, ids)], [19])
        assert logits is not None
        assert spread(logits, logits_of(checkpoint, ids)[-1:]) < TOLERANCE


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path)
    file = str(folder / "model.safetensors")
    weights = dict(mx.load(file))  # type: ignore[arg-type]
    mx.eval(weights)
    mx.save_safetensors(file, weights | {"language_model.model.other.weight": mx.ones((2,))})
    with pytest.raises(CheckpointError, match=r"other.weight has no place in a Qwen3.5 model"):
        read_checkpoint(folder)
