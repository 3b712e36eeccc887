import json
import os
import pty
import re
import shutil
import subprocess
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from tqdm import tqdm

import server
from engine.models.checkpoint import read_checkpoint
from server.catalogue import hub as hub_module
from server.catalogue.download import BAR_DELAY_S
from server.catalogue.hub import FoundModel, find_model, model_names
from server.catalogue.hub_cache import best_snapshot, missing_weights
from server.catalogue.names import ModelNotFoundError
from server.cli import model_files
from server.cli.log import configure_log
from server.cli.settings import read_settings
from server.shipped import shipped
from tests.clients.servers import QUIRE
from tests.models import QWEN3_4B
from tests.server.commands import MODEL, SETTINGS, Run, one_sentence
from tests.server.harness import DEADLINE_S
from tests.server.hub_server import Files, Hub, changed, files_of


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
    monkeypatch.setattr(hub_module, "HfApi", no_download)
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(folder), "models/tiny", "./models/tiny/", "~/models/tiny"):
        assert find_model(name) == FoundModel(name, "tiny", folder)


def test_the_demo_model_is_found_by_its_word_unless_there_is_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_model("demo")
    assert read_checkpoint(found.folder).vocab_size > 0
    assert model_names(found, None)[:3] == ("quire-demo", "model", "demo")
    assert find_model("quire-demo").folder == found.folder
    Path("demo").mkdir()
    assert find_model("demo").folder == tmp_path / "demo"
    assert model_names(find_model("demo"), None)[0] == "demo"


def test_what_a_wheel_has_beside_its_code_lies_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_checkout = shipped("quire.toml")
    assert in_a_checkout.is_file()
    monkeypatch.setattr(server, "__file__", str(tmp_path / "server/__init__.py"))
    installed = tmp_path / "server/configs/quire.toml"
    installed.parent.mkdir(parents=True)
    installed.touch()
    assert shipped("quire.toml") == installed


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gemma3:4b", "this is how Ollama names models: .*Qwen/Qwen3-4B"),
        ("me/qwen3:4b-q4", "this is how Ollama names models: .*Qwen/Qwen3-4B"),
        ("Qwen3-4B", "no such folder, and it is not a hub id, such as Qwen/Qwen3-4B or mlx-commu"),
        ("models/model.safetensors", "this is a file: name the folder that it lies in, .*/models$"),
        ("model.safetensors", "no such folder, and it is not a hub id, such as Qwen/Qwen3-4B"),
        ("gguf", "this is GGUF, and quire reads safetensors.*mlx-community/Qwen3-4B-4bit"),
        ("gguf/Qwen3-4B-Q4_K_M.gguf", "this is GGUF, and quire reads safetensors"),
        ("nosuch/Qwen3-4B-Q4_K_M.gguf", "there is no such file; and this is GGUF, and quire reads"),
        ("./nosuch", "there is no such folder, and it is not a hub id"),
        ("./models/nosuch", "there is no such folder, and it is not a hub id"),
        ("~/nosuch", "there is no such folder, and it is not a hub id"),
        *(
            (name, "there is no such folder, and it is not a hub id")
            for name in (".models/nosuch", "/no/such", "a/b/c", "a b/c", "nowhere/..", "a--b/c")
        ),
    ],
)
@pytest.mark.parametrize("command", ["serve", "plan"])
def test_a_name_that_is_none_is_told_what_to_write_without_asking_the_hub(
    command: str,
    name: str,
    problem: str,
    quire: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for file in ("models/model.safetensors", "gguf/Qwen3-4B-Q4_K_M.gguf", "gguf/config.json"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    monkeypatch.setattr("socket.socket.connect", no_download)
    monkeypatch.setattr(hub_module, "HfApi", no_download)
    monkeypatch.chdir(tmp_path)
    line = one_sentence(quire(command, name), MODEL)
    assert line.startswith(f"quire: {name}: ")
    assert re.search(problem, line), line


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
    monkeypatch.setattr(hub_module, "HfApi", refusing(error))
    with pytest.raises(ModelNotFoundError) as caught:
        find_model("someone/model")
    assert str(caught.value).startswith("someone/model: ")
    assert "\n" not in str(caught.value)


def test_offline_a_model_is_found_where_it_is_cached_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--someone--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("socket.socket.connect", no_download)
    for name in ("someone/model", "someone/model@main", "someone/model@0123abc"):
        found = find_model(name)
        assert (found.folder, found.name, found.notice) == (snapshot, "someone/model", "")
    for name in ("someone/else", "someone/model@other"):
        with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set: unset it to download"):
            find_model(name)


# --- the hub -------------------------------------------------------------------------------------


BIG = asdict(QWEN3_4B) | {"num_hidden_layers": 4000}


@pytest.mark.parametrize(
    ("files", "code", "problem"),
    [
        (lambda files: changed(files, model_type="mixtral"), MODEL, "model_type is 'mixtral'"),
        (
            lambda files: changed(files, **BIG),
            SETTINGS,
            r"alone take .* 4 bits its weights would still take .*: serve a smaller model$",
        ),
        (
            lambda files: files | {"model.safetensors": 61_000_000_000},
            SETTINGS,
            r"take 56\.81 GiB.* 4 bits its weights would take .*, and fit$",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_a_byte_of_its_weights(
    files: Callable[[Files], Files],
    code: int,
    problem: str,
    hub: Hub,
    tiny_files: Files,
    quire: Run,
) -> None:
    hub.push("someone/model", files(tiny_files))
    line = one_sentence(quire("serve", "someone/model"), code)
    assert re.search(problem, line), line
    assert "config.json" in hub.fetched_files()
    assert "model.safetensors" not in hub.fetched_files()


@pytest.mark.parametrize(
    "shards",
    [
        ("weights-1-of-1.safetensors",),
        ("consolidated.00.safetensors", "consolidated.01.safetensors"),
        ("model-00001.safetensors", "head.safetensors"),
        ("pytorch_model-1.safetensors", "a b.safetensors"),
        ("0.safetensors", "1.safetensors", "2.safetensors"),
    ],
)
def test_shards_are_fetched_whatever_the_index_calls_them(
    shards: tuple[str, ...], hub: Hub, tiny_model: Path, tmp_path: Path
) -> None:
    files = files_of(tiny_model)
    del files["model.safetensors"]
    loaded = mx.load(str(tiny_model / "model.safetensors"))
    assert isinstance(loaded, dict)
    tensors = sorted(loaded.items())
    index = {name: shards[number % len(shards)] for number, (name, _) in enumerate(tensors)}
    for shard in shards:
        part = {name: tensor for name, tensor in tensors if index[name] == shard}
        mx.save_safetensors(str(tmp_path / shard), part)
        files[shard] = (tmp_path / shard).read_bytes()
    files["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    hub.push("someone/model", files | {"adapter.safetensors": b"no weights"})
    found = find_model("someone/model")
    assert [file.path for file in found.missing] == sorted(shards)
    found.fetch_weights()
    assert len(read_checkpoint(found.folder).spec.layers) == 2
    assert best_snapshot("someone/model") == found.folder
    assert not missing_weights("someone/model", found.folder)
    assert "adapter.safetensors" not in hub.fetched_files()


def test_config_and_weights_are_of_one_commit(hub: Hub, tiny_files: Files) -> None:
    first = hub.push("someone/model", tiny_files)
    found = find_model("someone/model")
    hub.push("someone/model", changed(tiny_files, num_hidden_layers=7) | {"model.safetensors": b""})
    found.fetch_weights()
    assert {entry.partition("/")[0] for entry in hub.fetched} == {first}
    assert len(read_checkpoint(found.folder).spec.layers) == 2


def test_all_of_it_happens_in_order_when_a_model_of_the_hub_is_served(
    hub: Hub, tiny_files: Files, own_log: None, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.push("someone/model", tiny_files)
    settings = read_settings(None, {"cache": {"kv_budget": "8MiB", "heap_size": "1MiB"}})
    configure_log(settings.log)
    model = model_files.read_model("someone/model", settings)
    assert model.served.names[0] == "someone/model"
    assert hub.fetched_files()[-1] == "model.safetensors"
    assert not {"README.md", "pytorch_model.bin"} & set(hub.fetched_files())
    hub.fetched.clear()
    assert find_model("someone/model").missing == ()
    assert hub.fetched == []
    said = capsys.readouterr().err
    assert re.search(r"downloading someone/model: \d+ bytes of weights", said)
    assert "HTTP" not in said


def test_what_is_cached_is_served_when_the_hub_cannot_be_reached(
    hub: Hub, tiny_files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.push("someone/model", tiny_files)
    found = find_model("someone/model")
    found.fetch_weights()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert find_model("someone/model").missing == ()
    for listing in found.folder.parents[1].glob("trees/*"):
        listing.unlink()
    # The hub's client knows the listings of the folder that it has read.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "moved"))
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    again = find_model("someone/model")
    assert (again.folder.name, again.missing) == (found.folder.name, ())
    assert re.search("commit .* of the cache is taken, .* the hub did not answer", again.notice)


def test_who_is_served_from_the_cache_is_told_so(
    hub: Hub,
    tiny_files: Files,
    own_log: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commit = hub.push("someone/model", tiny_files)
    find_model("someone/model").fetch_weights()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    settings = read_settings(None, {"cache": {"kv_budget": "8MiB", "heap_size": "1MiB"}})
    configure_log(settings.log)
    assert model_files.read_model("someone/model", settings).served.names[0] == "someone/model"
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if "[warning" in line)
    assert f"commit {commit[:12]} of the cache is taken" in warning


def test_weights_that_the_hub_does_not_give_after_all_are_said(hub: Hub, tiny_files: Files) -> None:
    commit = hub.push("someone/model", tiny_files)
    found = find_model("someone/model")
    del hub.commits[commit]["model.safetensors"]
    with pytest.raises(ModelNotFoundError, match="the hub failed: ") as caught:
        found.fetch_weights()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"config.json": b"{}", "Qwen3-4B-Q4_K_M.gguf": 2_000_000_000}, "this is GGUF, and quire"),
        ({"config.json": b"{}", "pytorch_model.bin": 1}, r"has no model\*\.safetensors file"),
        ({"config.json": b"{}", "old/model.safetensors": 1}, r"has no model\*\.safetensors file"),
    ],
)
def test_a_repository_without_safetensors_is_refused_before_they_are_looked_for(
    files: Files, problem: str, hub: Hub, quire: Run
) -> None:
    hub.push("someone/model", files)
    line = one_sentence(quire("serve", "someone/model"), MODEL)
    assert line.startswith("quire: someone/model: ")
    assert re.search(problem, line)


def test_a_download_is_one_bar_whose_total_is_right(
    hub: Hub, tiny_files: Files, tmp_path: Path
) -> None:
    weights = tiny_files["model.safetensors"]
    assert isinstance(weights, bytes)
    # Cut off, so that the command ends when all is there.
    hub.push("someone/model", tiny_files | {"model.safetensors": weights[:-1000]})
    hub.stop_at = len(weights) // 2
    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(stderr, (24, 100))
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(
        [QUIRE, "serve", "someone/model", "--port", "0"],
        stderr=stderr,
        env=os.environ | environment,
    )
    os.close(stderr)
    assert hub.waits.wait(DEADLINE_S)
    time.sleep(1.1 * BAR_DELAY_S)
    hub.go_on.set()
    said = all_of(terminal)
    assert process.wait(DEADLINE_S) == MODEL, said
    assert "it was cut off" in said
    assert "HTTP Request" not in said
    bars = re.findall(r"\r([^|\r\n]+?):[^|\r\n]*\|[^|\r\n]*\| *\S+?/(\S+) \[", said)
    total = tqdm.format_sizeof(len(weights) - 1000, divisor=1024)
    assert set(bars) == {("downloading", total)}, said
    assert "files" not in said, "there is no other bar"


def all_of(terminal: int) -> str:
    """What is written to a terminal, until nobody has it open any more."""
    said = b""
    with os.fdopen(terminal, "rb", buffering=0) as reader, suppress(OSError):
        while more := reader.read(4096):
            said += more
    return said.decode(errors="replace")


# --- names --------------------------------------------------------------------


def test_a_model_of_the_hub_answers_to_its_id_first(tmp_path: Path) -> None:
    found = FoundModel("someone/model@main", "someone/model", tmp_path / "0123abc")
    assert model_names(found, None)[0] == "someone/model"
    assert model_names(found, "alias")[:2] == ("alias", "someone/model")
    assert "someone/model@main" in model_names(found, None)
