import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from server import hub
from server.hub import (
    ModelNotFoundError,
    SamplingDefaultsError,
    find_model,
    model_names,
    sampling_defaults,
)


def no_download(*_: Any, **__: Any) -> str:
    raise AssertionError("the hub was asked")


def refusing(error: Exception) -> Callable[..., str]:
    def download(*_: Any, **__: Any) -> str:
        raise error

    return download


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://hub.invalid/"))


def test_a_folder_is_found_by_any_path_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", no_download)
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), "models/tiny", "./models/tiny/", "~/models/tiny"):
        assert find_model(name) == folder


@pytest.mark.parametrize("name", ["tiny", "/no/such/folder", "a/b/c", "../a/b", "a b/c"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_not_looked_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", no_download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="it is not a hub id"):
        find_model(name)


def test_a_hub_id_is_downloaded_without_what_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert find_model("someone/some-model.v1") == tmp_path
    ((name, patterns),) = asked
    assert name == "someone/some-model.v1"
    assert "model*.safetensors" in patterns
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in patterns)


@pytest.mark.parametrize(
    "error",
    [
        HfHubHTTPError("no luck\nmore", response=response(500)),
        LocalEntryNotFoundError("not cached\nmore"),
        OSError("disk full\nmore"),
        httpx2.ConnectError("no network\nmore"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", refusing(error))
    with pytest.raises(ModelNotFoundError) as caught:
        find_model("someone/model")
    assert str(caught.value).startswith("someone/model: ")
    assert "\n" not in str(caught.value)


def test_a_hub_id_that_may_not_be_downloaded_is_found_where_it_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--someone--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123abc")
    cached = partial(snapshot_download, cache_dir=tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", cached)
    monkeypatch.setattr("socket.socket.connect", no_download)
    assert find_model("someone/model", download=False) == snapshot
    with pytest.raises(ModelNotFoundError, match="it is not in the hub's cache"):
        find_model("someone/else", download=False)


@pytest.mark.parametrize("name", ["../tiny", "models/..", "a--b/c"])
def test_a_name_that_the_hub_could_not_have_is_refused_without_asking(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", no_download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="there is no such folder"):
        find_model(name)


def test_a_folder_answers_to_its_name_and_path(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    assert model_names(str(folder), folder, None) == ("tiny", str(folder))
    assert model_names(str(folder), folder, "alias") == ("alias", "tiny", str(folder))


def test_a_model_of_the_hub_answers_to_its_id_first(tmp_path: Path) -> None:
    snapshot = tmp_path / "0123abc"
    assert model_names("someone/model", snapshot, None)[0] == "someone/model"
    assert model_names("someone/model", snapshot, "alias")[:2] == ("alias", "someone/model")


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({}, {}),
        ({"eos_token_id": 5, "max_length": 7}, {}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "top_p": 0.95, "min_p": None}, {"top_p": 0.95}),
        ({"do_sample": False, "top_p": 0.95}, {"temperature": 0.0}),
        ({"repetition_penalty": 1, "min_p": 0}, {"repetition_penalty": 1, "min_p": 0}),
    ],
)
def test_the_makers_of_a_model_recommend_how_to_sample(
    config: dict[str, Any], defaults: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == defaults


def test_a_model_without_recommendations_has_none(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", 1.5),
        ("min_p", True),
        ("repetition_penalty", [1]),
    ],
)
def test_a_recommendation_that_no_request_could_make_is_refused(
    field: str, value: Any, tmp_path: Path
) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({field: value}))
    with pytest.raises(SamplingDefaultsError) as caught:
        sampling_defaults(tmp_path)
    assert str(caught.value).startswith(f"{file}: {field}: ")
