"""Which folders make vectors, and which of those make them as quire does."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.checkpoint import CheckpointError, read_checkpoint
from tests.models import ModelSpec, write_embedding_model, write_model, write_modules

UNTIED = ModelSpec(tie_word_embeddings=False)


@pytest.mark.parametrize("spec", [ModelSpec(), UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("modules", [True, False])
@pytest.mark.parametrize("bare", [True, False])
def test_a_folder_makes_vectors_when_one_thing_says_so(
    tmp_path: Path, spec: ModelSpec, modules: bool, bare: bool
) -> None:
    folder = write_embedding_model(tmp_path, spec, modules=modules, bare=bare)
    headless = not spec.tie_word_embeddings
    found = read_checkpoint(folder)
    assert found.embeds == (modules or bare or headless)
    assert found.naming.prefix == ("" if bare else "model.")


def test_a_setting_has_the_last_word(tmp_path: Path) -> None:
    lost = write_embedding_model(tmp_path / "lost", modules=False, bare=False)
    assert not read_checkpoint(lost).embeds
    assert read_checkpoint(lost, embeds=True).embeds
    known = write_embedding_model(tmp_path / "known")
    assert not read_checkpoint(known, embeds=False).embeds
    headless = write_embedding_model(tmp_path / "headless", UNTIED)
    with pytest.raises(CheckpointError, match=r"no file holds the tensor lm_head.weight"):
        read_checkpoint(headless, embeds=False)


def test_a_head_that_is_not_needed_is_no_weight(tmp_path: Path) -> None:
    folder = write_model(tmp_path, UNTIED)
    write_modules(folder)
    found = read_checkpoint(folder)
    assert found.embeds
    assert found.num_weights < read_checkpoint(folder, embeds=False).num_weights


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode": "lasttoken"},
        {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False},
    ],
)
@pytest.mark.parametrize(
    "kinds", [("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize")]
)
def test_pooling_of_the_last_token_is_understood_in_old_and_new_files(
    tmp_path: Path, pooling: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    folder = write_embedding_model(tmp_path)
    write_modules(folder, kinds, pooling)
    assert read_checkpoint(folder).embeds


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean_tokens"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "lasttoken, mean_tokens",
        ),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "cls+lasttoken"}, "cls, lasttoken"),
        ({"pooling_mode_lasttoken": False}, "none"),
    ],
)
def test_another_pooling_is_refused_by_name(
    tmp_path: Path, pooling: dict[str, Any], named: str
) -> None:
    folder = write_embedding_model(tmp_path)
    write_modules(folder, pooling=pooling)
    with pytest.raises(CheckpointError, match=rf"1_Pooling.config.json: the pooling is {named};"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([], "the modules are none"),
        ({}, "is not a JSON array"),
        ([1, "Pooling"], "the modules are None, None"),
        (
            [{"type": "a.Transformer"}, {"type": "b.Pooling"}, {"type": "c.Dense"}],
            "Pooling, Dense;",
        ),
        ([{"type": "Transformer"}, {"type": "Pooling", "path": "2_P"}], "2_P.* does not exist"),
    ],
)
def test_other_modules_are_refused_by_name(tmp_path: Path, modules: Any, message: str) -> None:
    folder = write_embedding_model(tmp_path)
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(folder)
    assert "\n" not in str(caught.value)
