import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub import constants

from engine.models.checkpoint import read_checkpoint
from server.catalogue import local_models as local_models_module
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub import find_model
from server.catalogue.local_models import LocalModel, Place, local_models, model_here
from server.shipped import DEMO_MODEL, shipped
from tests.engine.models.hybrids import write_hybrid
from tests.models import TINY
from tests.server.hub_server import Files, Hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's, with nothing in it."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


def cached(cache: Path, name: str, model: Path, commit: str = COMMIT, main: bool = True) -> Path:
    """A model in the cache, as the hub's client lays it down."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(model, snapshot)
    if main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return snapshot


def config_of(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def one(folder: Path) -> LocalModel:
    (found,) = local_models([folder], hub=False)
    return found


def test_a_model_in_the_hubs_cache_is_listed_with_all_facts(
    cache: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached(cache, "someone/tiny", tiny_model)
    weights = snapshot / "model.safetensors"
    os.utime(weights, (1000.0, 2000.0))
    parameters = weights_of(snapshot)
    monkeypatch.delattr(mx, "load")
    monkeypatch.delattr(mx, "array")
    (found,) = local_models([])
    assert replace(found, digest="", checkpoint=None) == LocalModel(
        name="someone/tiny",
        folder=snapshot,
        size_bytes=weights.stat().st_size,
        modified=2000.0,
        revision=COMMIT,
        family="qwen3",
        parameters=parameters,
        quantization="fp32",
        max_position_embeddings=TINY.max_position_embeddings,
        embeds=False,
        problem=None,
    )
    assert len(found.digest) == 64
    assert found.checkpoint == read_checkpoint(snapshot)
    with FolderReader() as reader:
        assert model_here(Place("someone/tiny"), reader) == found
        assert model_here(Place("someone/else"), reader) is None
    assert local_models([], hub=False) == ()


def weights_of(folder: Path) -> int:
    arrays: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    return sum(array.size for array in arrays.values())


def test_folders_are_models_or_have_models_one_or_two_levels_below(
    cache: Path, tiny_model: Path, tmp_path: Path
) -> None:
    shelf = tmp_path / "shelf"
    for place in ("alone", "someone/tiny", ".trash/gone", "a/b/too-deep"):
        shutil.copytree(tiny_model, shelf / place)
    (shelf / "notes.txt").write_text("words")
    found = local_models([shelf, shelf / "alone", tmp_path / "nowhere", shipped(DEMO_MODEL)])
    assert [(model.name, model.revision) for model in found] == [
        ("alone", None),
        ("quire-demo", None),
        ("someone/tiny", None),
    ]
    assert found[2].folder == shelf / "someone/tiny"
    assert one(shelf / "alone").name == "alone"


def test_a_name_is_of_one_model_that_can_be_served_if_any_can(
    cache: Path, tiny_model: Path, tmp_path: Path
) -> None:
    snapshot = cached(cache, "someone/tiny", tiny_model)
    broken = tmp_path / "broken/someone/tiny"
    whole = tmp_path / "whole/someone/tiny"
    shutil.copytree(tiny_model, broken)
    shutil.copytree(tiny_model, whole)
    (broken / "model.safetensors").unlink()
    first, second = tmp_path / "broken", tmp_path / "whole"
    assert [model.folder for model in local_models([first, second])] == [whole]
    assert [model.folder for model in local_models([first])] == [snapshot]
    assert [model.folder for model in local_models([first], hub=False)] == [broken]


def test_of_a_repository_main_counts_unless_only_another_commit_can_be_served(
    cache: Path, tiny_model: Path
) -> None:
    main = cached(cache, "someone/tiny", tiny_model)
    other = cached(cache, "someone/tiny", tiny_model, OTHER, main=False)
    os.utime(other / "model.safetensors", (5e9, 5e9))
    assert local_models([])[0].folder == main
    (main / "model.safetensors").unlink()
    assert local_models([])[0].folder == other
    (other / "model.safetensors").unlink()
    assert local_models([])[0].folder == main


def test_what_an_older_client_has_not_fetched_is_seen_without_its_listing(
    cache: Path, tiny_model: Path
) -> None:
    snapshot = cached(cache, "someone/tiny", tiny_model)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/gone")
    problem = "`quire pull someone/tiny` fetches what is missing"
    assert local_models([])[0].problem == f"weights are not here yet: {problem}"
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert local_models([])[0].problem == f"2 files of weights are not here yet: {problem}"


def test_a_shard_that_is_missing_in_a_folder_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_model, folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    problem = "1 file of weights is missing, such as model-2.safetensors"
    assert one(folder).problem == problem


@pytest.mark.parametrize(
    ("changes", "family", "quantization", "problem"),
    [
        ({"model_type": "qwen9"}, "qwen9", "fp32", "config.json: model_type is 'qwen9'; quire"),
        (
            {"model_type": None, "dtype": None, "torch_dtype": None},
            "",
            "",
            "config.json: model_type is None; quire",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "qwen3", "awq", "is 'awq'; quire ser"),
        (
            {"quantization": {"bits": 4, "group_size": 32, "mode": "fp3"}},
            "qwen3",
            "fp3",
            "config.json: quantization.mode is 'fp3'",
        ),
        (
            {"quantization": {"bits": 4, "group_size": 64}, "hidden_size": True},
            "qwen3",
            "4-bit",
            "config.json: hidden_size is True; it must be a number above 0",
        ),
    ],
)
def test_what_cannot_be_served_is_listed_with_its_reason(
    changes: dict[str, Any],
    family: str,
    quantization: str,
    problem: str,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_model, folder)
    config_of(folder, **changes)
    found = one(folder)
    assert (found.family, found.quantization) == (family, quantization)
    assert found.problem is not None
    assert problem in found.problem
    assert str(folder) not in found.problem
    assert found.size_bytes > 0


def test_a_model_without_a_tokenizer_is_listed_as_such(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "tiny")
    (tmp_path / "tiny/tokenizer.json").unlink()
    assert one(tmp_path / "tiny").problem == "tokenizer.json: the file does not exist"


def test_a_nested_config_says_what_matrices_are_stored_as(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path / "hybrid", hub=True, dtype="bfloat16")
    found = one(folder)
    assert (found.family, found.quantization, found.problem) == ("qwen3_5", "bf16", None)
    (folder / "model.safetensors").unlink()
    assert one(folder).quantization == "bf16"


def test_gguf_is_listed_as_what_it_is(cache: Path, tiny_model: Path, tmp_path: Path) -> None:
    for name, files in (
        ("bare", ["a.gguf"]),
        ("config", ["config.json", "a.gguf"]),
        ("torch", ["a.bin"]),
    ):
        folder = tmp_path / "shelf" / name
        folder.mkdir(parents=True)
        for file in files:
            (folder / file).write_bytes((tiny_model / "config.json").read_bytes())
    bare, config, torch = local_models([tmp_path / "shelf"])
    assert bare.problem == config.problem
    assert "this is GGUF, and quire reads safetensors" in str(bare.problem)
    assert (bare.quantization, bare.size_bytes > 0) == ("gguf", True)
    assert torch.problem == "there is no config.json"


def test_a_repository_of_the_hub_without_safetensors_says_so(hub: Hub, tiny_files: Files) -> None:
    hub.push("someone/torch", {k: v for k, v in tiny_files.items() if "safetensors" not in k})
    with pytest.raises(ValueError, match="no model"):
        find_model("someone/torch")
    assert local_models([])[0].problem == "the repository has no model*.safetensors file"


def test_one_broken_model_hides_no_other(
    cache: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(cache, "someone/tiny", tiny_model)
    deep = cached(cache, "someone/deep", tiny_model)
    (deep / "config.json").write_text("[" * 100_000)
    for other in ("models--someone--empty", "datasets--someone--words"):
        (cache / other).mkdir()
    (cache / "version.txt").write_text("1")
    secret = cached(cache, "someone/secret", tiny_model)
    refs = cache / "models--someone--tiny/refs/main"
    refs.write_bytes(b"\xff\xfe")
    iterdir = Path.iterdir

    def guarded(path: Path) -> Any:
        if path == secret:
            raise PermissionError
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", guarded)
    problems = {model.name: model.problem for model in local_models([])}
    assert problems["someone/tiny"] is None
    assert problems["someone/deep"] == "config.json: the file is not readable JSON"
    assert problems["someone/secret"] == "its files cannot be read: PermissionError: "
    assert set(problems) == {"someone/tiny", "someone/deep", "someone/secret"}


def test_a_model_that_goes_while_it_is_looked_at_is_no_error(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tiny"
    found = local_models_module.read_model(str(folder), "tiny", None, None)
    assert (found["size_bytes"], found["problem"]) == (0, "there is no config.json")
