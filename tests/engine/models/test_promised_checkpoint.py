"""What is promised of weights is what they are, once they are there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    promised_checkpoint,
    read_checkpoint,
)
from engine.models.draft_head import MARK
from engine.models.tensors import NAMINGS
from tests.draft_heads import write_head
from tests.engine.models.hybrids import FIELDS, QWEN3_5_MOE, QWEN3_NEXT, write_hybrid
from tests.models import QWEN3_4B, TINY, ModelSpec, write_config, write_embedding_model, write_model

HEAD_BYTES = TINY.vocab_size * TINY.hidden_size * 4
UNTIED = ModelSpec(tie_word_embeddings=False)


def promised_of(whole: Checkpoint, **how: Any) -> Checkpoint:
    """What would have been promised of a folder without its weights."""
    (whole.path / "model.safetensors").unlink()
    return promised_checkpoint(whole.path, whole.stored_bytes, **how)


@pytest.mark.parametrize("spec", [TINY, UNTIED])
@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "bits": 4},
        {"dtype": "float32", "bits": 8, "group_size": 64},
        {"dtype": "bfloat16", "bits": 4, "mode": "mxfp4"},
    ],
)
def test_a_promise_is_what_comes(tmp_path: Path, spec: ModelSpec, how: dict[str, Any]) -> None:
    whole = read_checkpoint(write_model(tmp_path, spec, **how))
    assert promised_of(whole) == whole


@pytest.mark.parametrize("how", [{}, {"embeds": True}])
def test_a_model_of_vectors_has_no_head(tmp_path: Path, how: dict[str, Any]) -> None:
    whole = read_checkpoint(write_embedding_model(tmp_path, UNTIED, modules=not how))
    assert promised_of(whole, **how) == replace(whole, naming=NAMINGS[0])


def test_the_index_of_several_files_tells_a_model_of_vectors(tmp_path: Path) -> None:
    whole = read_checkpoint(write_embedding_model(tmp_path, UNTIED, modules=False))
    index = {"weight_map": {"embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert promised_of(whole).embeds


def test_a_head_that_is_never_read_is_no_weight(tmp_path: Path) -> None:
    folder = write_model(tmp_path, UNTIED)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    whole = read_checkpoint(folder)
    promised = promised_of(whole)
    assert promised.packed_bytes == whole.packed_bytes
    assert promised.stored_bytes == whole.stored_bytes


@pytest.mark.parametrize("fields", [FIELDS, QWEN3_5_MOE, QWEN3_NEXT], ids=str)
def test_the_hubs_hybrids_are_known_by_their_config_alone(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    whole = read_checkpoint(write_hybrid(tmp_path, hub=True, dtype="float16", **fields))
    assert promised_of(whole) == replace(whole, naming=NAMINGS[0], unread=())


@pytest.mark.parametrize("fields", [FIELDS, QWEN3_5_MOE], ids=str)
def test_a_head_is_promised_if_the_index_or_the_caller_knows_of_one(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    file = "model-mtp.safetensors"
    whole = read_checkpoint(write_head(write_hybrid(tmp_path, dtype="bfloat16", **fields), file))
    known = promised_of(whole, head=True)
    assert known == replace(whole, naming=NAMINGS[0])
    assert promised_checkpoint(tmp_path).spec.draft is None
    index = {"weight_map": dict.fromkeys(["lm_head.weight", f"mtp.{MARK}"], file)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert promised_checkpoint(tmp_path, whole.stored_bytes) == known
    for how in ({"drafts": False}, {"embeds": True, "head": True}):
        assert promised_checkpoint(tmp_path, **how).spec.draft is None


def test_files_that_are_larger_than_the_promise_count_as_they_are(tmp_path: Path) -> None:
    folder = write_config(tmp_path, QWEN3_4B)
    usual = promised_checkpoint(folder, 8_000_000_000)
    wide = promised_checkpoint(folder, 61_000_000_000)
    assert usual.packed_bytes < 8_100_000_000
    assert 60_000_000_000 < wide.packed_bytes < 61_000_000_000


def test_a_config_that_cannot_be_served_is_refused_without_weights(tmp_path: Path) -> None:
    for changes, problem in (
        ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
        (
            {"model_type": "qwen4_exp", "text_config": {"model_type": "qwen3_5"}},
            "model_type is 'qwen4_exp'; quire serves models of llama, .*, qwen3_5_moe",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
        ({"quantization": {"bits": 7, "group_size": 64}}, "bits is 7"),
    ):
        folder = write_config(tmp_path, TINY, **changes)
        with pytest.raises(CheckpointError, match=problem):
            promised_checkpoint(folder, 1)
