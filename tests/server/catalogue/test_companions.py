"""The head that drafts for a model is found where it lies, by the model's name."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from server.catalogue.companions import companion_among, companion_names
from server.catalogue.local_models import local_models, places_here
from tests.draft_heads import write_companion, write_head
from tests.engine.models.hybrids import write_hybrid

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("model", "companion"),
    [
        ("mlx-community/Qwen3.5-4B-MLX-4bit", "Qwen3.5-4B-MTP-4bit"),
        ("mlx-community/Qwen3.5-9B-4bit-DWQ", "Qwen3.5-9B-MTP-4bit"),
        ("mlx-community/Qwen3.6-27B-mxfp4", "Qwen3.6-27B-MTP-4bit"),
        ("lmstudio-community/Qwen3.6-35B-A3B-MLX-8bit", "Qwen3.6-35B-A3B-MTP-8bit"),
        ("Qwen3.8-27B-8bit", "Qwen3.8-27B-MTP-8bit"),
        ("Qwen3.8-27B-OptiQ-4BIT", "Qwen3.8-27B-MTP-4bit"),
        ("mlx-community/Qwen3.5-27B-bf16", "Qwen3.5-27B-MTP-bf16"),
        ("Qwen/Qwen3.5-0.8B", "Qwen3.5-0.8B-MTP-4bit"),
    ],
)
def test_a_companion_is_called_like_its_model_and_first_comes_one_of_its_bits(
    model: str, companion: str
) -> None:
    first, *others = companion_names(model)
    assert first == f"mlx-community/{companion}"
    base = first.rpartition("-")[0]
    assert {first, *others} == {f"{base}-4bit", f"{base}-8bit", f"{base}-bf16"}


def test_the_best_companion_on_this_disk_is_taken_if_it_is_complete(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    name, shelf = "someone/Qwen3.5-4B-4bit", tmp_path / "shelf"
    snapshots = tmp_path / "cache/models--someone--Qwen3.5-4B-4bit/snapshots"
    folder, model = shelf / "Qwen3.5-4B-4bit", snapshots / COMMIT

    def found() -> list[str | None]:
        wanted: tuple[str | Path, ...] = name, folder, model
        return [companion_among(places_here([tmp_path / "own"]), each) for each in wanted]

    folder.mkdir(parents=True)
    model.mkdir(parents=True)
    assert found() == [None] * 3
    cached = tmp_path / "cache/models--mlx-community--Qwen3.5-4B-MTP-4bit/snapshots" / COMMIT
    cached.mkdir(parents=True)
    assert found() == [None] * 3, "its weights are missing"
    eight = shutil.copytree(tiny_model, tmp_path / "own/someone/qwen3.5-4b-mtp-8bit")
    assert found() == [str(eight)] * 3
    shutil.copytree(tiny_model, cached, dirs_exist_ok=True)
    assert found() == [str(cached)] * 3
    beside = shelf / "Qwen3.5-4B-MTP-4bit"
    beside.mkdir()
    assert found() == [str(cached), str(beside), str(cached)]


def test_a_model_is_listed_with_the_memory_of_its_companion_unless_it_has_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model = write_hybrid(tmp_path / "shelf/Qwen3.5-4B-4bit")
    (before,) = local_models([tmp_path / "shelf"], hub=False)
    write_companion(tmp_path / "shelf/Qwen3.5-4B-MTP-8bit", model)
    found, companion = local_models([model.parent], hub=False)
    assert before.checkpoint is not None
    assert found.checkpoint is not None
    assert before.checkpoint.spec.draft is None
    assert found.checkpoint.stored_bytes > before.checkpoint.stored_bytes
    assert companion.family == "qwen3_5_mtp"
    assert str(companion.problem).startswith("config.json: this is no model, but the head that dr")
    write_head(model)
    own = local_models([model], hub=False)[0].checkpoint
    assert own is not None
    assert own.draft_files == (model / "mtp.safetensors",)
