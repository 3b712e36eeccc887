"""``quire pull``: what it says, and that it says it before the first byte of weights."""

import io
import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import DeleteCacheStrategy, constants, snapshot_download
from typer.testing import CliRunner

from kvcache.budget import gib
from server.catalogue import hub as hub_module
from server.catalogue.hub import find_model
from server.cli.commands import app
from tests.draft_heads import write_companion
from tests.engine.models.hybrids import write_hybrid
from tests.models import write_embedding_model, write_model
from tests.server.cli.test_log import NAMES
from tests.server.commands import MODEL, SETTINGS, Run
from tests.server.hub_server import Files, Hub, changed, files_of

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 558848\n"
POINTS = "this is a pointer of Git LFS, .*: remove the model from the hub's cache with `quire rm`"


def adapters(**config: str) -> Files:
    return {"adapter_config.json": json.dumps(config).encode(), "adapters.safetensors": 5}


def shards(*others: str) -> Files:
    """An index that also names files that are not there."""
    index = {"weight_map": {name: f"{name}.safetensors" for name in ("model", *others)}}
    return {"model.safetensors.index.json": json.dumps(index).encode()}


@pytest.mark.parametrize(
    ("kept", "more", "problem"),
    [
        ("", {"Q4/a.GGUF": 5}, "this is GGUF, and quire reads safetensors"),
        (
            "",
            adapters(peft_type="LORA", base_model_name_or_path="a/b"),
            "for a/b, .* PEFT's `merge",
        ),
        (
            "",
            adapters(fine_tune_type="lora", model="a/b"),
            "adapters for a/b, .*: fuse .*mlx_lm.fu",
        ),
        (
            "config|tok",
            adapters(model="a\nb"),
            r"these are adapters for a\\nb, and quire serves who",
        ),
        ("", adapters(), "these are adapters for some model, "),
        ("", {"model-1.bin": 5}, r"the repository has no model\*\.safetensors file"),
        (".", shards("b"), "does not have, 1 of 2, such as b.safetensors"),
        (".", shards("b", "c"), "does not have, 2 of 3, such as b.safetensors"),
        (".", shards("a/b"), "does not have, 1 of 2, such as a/b.safetensors"),
        (".", shards("a\nb"), r"does not have, 1 of 2, such as a\\nb.safetensors"),
        (".", shards("x" * 999), "1 of 2, such as x{99}\N{HORIZONTAL ELLIPSIS}"),
        (".", {"config.json": POINTER}, f"config.json: {POINTS}"),
        (".", {"tokenizer.json": POINTER}, f"tokenizer.json: {POINTS}"),
        (".", {"generation_config.json": POINTER}, f"generation_config.json: {POINTS}"),
        (".", {"chat_template.jinja": POINTER}, f"chat_template.jinja: {POINTS}"),
        (".", {"merges.txt": POINTER}, f"merges.txt: {POINTS}"),
        ("(?!tokenizer.json)", {}, r"tokenizer\.json: the file does not exist"),
        (".", {"config.json": b'{"model_type": "gpt9"}'}, "model_type is 'gpt9'; quire serves"),
    ],
)
def test_what_nobody_could_serve_is_named_before_a_byte_of_weights_and_by_quire_alone(
    kept: str,
    more: Files,
    problem: str,
    hub: Hub,
    tiny_files: Files,
    quire: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = logging.StreamHandler(io.StringIO())
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [terminal])
    whole = {path: text for path, text in tiny_files.items() if kept and re.match(kept, path)}
    hub.push("someone/model", whole | more)
    result = quire("pull", "someone/model")
    assert (result.exit_code, result.stderr.count("\n")) == (MODEL, 1)
    assert re.search(problem, result.stderr), result.output
    assert not any(path.endswith("safetensors") for path in hub.sent_bytes)
    assert terminal.stream.getvalue() == ""


@pytest.mark.parametrize(
    ("token", "how"),
    [(None, "then set HF_TOKEN to a token of yours, or run `hf auth login`"), ("hf_x", "not been")],
)
def test_a_gated_model_is_refused_with_what_to_do_before_a_byte_of_it(
    token: str | None,
    how: str,
    hub: Hub,
    tiny_files: Files,
    quire: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.push("someone/model", tiny_files)
    hub.gated.add("someone/model")
    monkeypatch.setattr(hub_module, "get_token", lambda: token)
    result = quire("pull", "someone/model")
    assert result.exit_code == MODEL
    assert f"gated: accept its licence at {hub.url}/someone/model; " in result.stderr
    assert how in result.stderr
    assert hub.sent_bytes == {}


def test_a_disk_without_room_is_refused_before_a_byte_of_the_weights(
    hub: Hub, tiny_files: Files, quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from server.cli import models as pull

    hub.push("someone/model", tiny_files)
    for module in (hub_module, pull):
        monkeypatch.setattr(module, "free_bytes", lambda _: 1000)
    result = quire("pull", "someone/model", "--dry-run")
    assert result.exit_code == MODEL
    assert "has 1000 bytes left: make room" in result.stderr
    assert "1000 bytes are free in " in result.stdout
    assert set(hub.sent_bytes) <= {"config.json", "generation_config.json"}


def test_a_dry_run_says_all_and_fetches_what_the_model_is_alone(
    hub: Hub, tiny_files: Files, quire: Run
) -> None:
    commit = hub.push("someone/model", tiny_files)
    result = quire("pull", "someone/model", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        f"someone/model, commit {commit[:12]}: qwen3, 0.14 million parameter"
    )
    assert re.fullmatch(
        r"weights: (\d+ bytes) of \1 are to be fetched; .* are free in .*cache", lines[1]
    )
    assert re.search(r"serves it with \d+ tokens of context; a token of K and V takes", lines[2])
    assert set(hub.sent_bytes) == {"config.json", "generation_config.json"}


def test_a_model_is_fetched_once_and_a_pin_is_kept(hub: Hub, tiny_files: Files, quire: Run) -> None:
    old = hub.push("someone/model", tiny_files)
    hub.push("someone/model", changed(tiny_files, num_hidden_layers=7))
    result = quire("pull", f"someone/model@{old}")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert f"`quire serve someone/model@{old}` serves it." in result.stdout
    assert "model.safetensors" in hub.sent_bytes
    hub.sent_bytes.clear()
    again = quire("pull", f"someone/model@{old}")
    assert "all of them here" in again.stdout
    assert hub.sent_bytes == {}
    assert not (Path(constants.HF_HUB_CACHE) / "models--someone--model/refs").exists()


@pytest.fixture
def heads(tmp_path: Path) -> tuple[Files, Files]:
    """The files of a Qwen3.5 without a head, and those of its companion."""
    model = write_hybrid(tmp_path / "model")
    files, companion = files_of(model), write_companion(tmp_path / "companion", model)
    return files, files_of(companion)


def test_a_model_without_a_head_is_fetched_with_its_companion(
    hub: Hub, heads: tuple[Files, Files], quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, companion = "mlx-community/Qwen3.5-4B-MLX-4bit", "mlx-community/Qwen3.5-4B-MTP-8bit"
    hub.push(model, heads[0])
    none = quire("pull", model)
    assert none.exit_code == 0, none.output
    assert none.stdout.splitlines()[-2] == "the hub has no head that drafts for it"
    hub.push("mlx-community/Qwen3.5-4B-MTP-4bit", heads[0])  # a whole model is no companion
    commit = hub.push(companion, heads[1])
    monkeypatch.setenv("QUIRE_ENGINE__DRAFTS", "false")
    assert companion not in quire("pull", model).stdout
    monkeypatch.delenv("QUIRE_ENGINE__DRAFTS")
    hub.fetched.clear()
    *_, said, last = quire("pull", model).stdout.splitlines()
    assert re.fullmatch(
        f"{companion}, the head that drafts .*: [0-9.]+ MiB are to be fetched", said
    )
    assert last == f"It is here: `quire serve {model}` serves it."
    assert f"{commit}/model.safetensors" in hub.fetched
    assert quire("pull", model).stdout.splitlines()[-2].endswith(": it is here")
    own, head = json.loads(quire("models", "--json").stdout)["models"]
    assert (own["name"], own["served"], head["name"], head["served"]) == (
        model,
        True,
        companion,
        False,
    )
    assert "the head that drafts" in head["reason"]
    for named in ("", f"{companion}@{commit}"):
        monkeypatch.setenv("QUIRE_ENGINE__DRAFT_MODEL", named)
        assert "drafts: of text, and by the model's head (" in quire("plan", model).stdout


def test_a_companion_is_fetched_by_its_own_name(
    hub: Hub, heads: tuple[Files, Files], quire: Run
) -> None:
    hub.push("someone/head", heads[1])
    dry = quire("pull", "someone/head", "--dry-run")
    assert (dry.exit_code, "model.safetensors" in hub.sent_bytes) == (0, False), dry.output
    assert quire("pull", "someone/head").exit_code == 0
    assert hub.fetched_files()[-1] == "model.safetensors"


@pytest.mark.parametrize("file", ["mtp.safetensors", "optiq/mtp.safetensors", "mtp/a.safetensors"])
def test_a_head_that_the_index_leaves_out_is_fetched_with_its_model_where_drafts_are_on(
    file: str, hub: Hub, heads: tuple[Files, Files], quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: Files = {"mtp/a/b.safetensors": 5, "a/b/mtp.safetensors": 5, "adapter.safetensors": 5}
    hub.push("someone/model", heads[0] | {file: heads[1]["model.safetensors"]} | others)
    monkeypatch.setenv("QUIRE_ENGINE__DRAFTS", "false")
    assert quire("pull", "someone/model").exit_code == 0
    assert "all of them here" in quire("pull", "someone/model").stdout
    assert file not in hub.sent_bytes
    assert "drafts: off\n" in quire("plan", "someone/model").stdout
    monkeypatch.delenv("QUIRE_ENGINE__DRAFTS")
    assert "drafts: of text, and by the model's head\n" in quire("plan", "someone/model").stdout
    assert "drafts" not in quire("pull", "someone/model").stdout.splitlines()[-2], "it has a head"
    assert hub.fetched_files()[-1] == file
    assert not hub.sent_bytes.keys() & others.keys()
    drafting = f"by the model's head ({find_model('someone/model').folder}/{file})"
    assert drafting in quire("plan", "someone/model").stdout


def test_one_that_is_too_large_for_here_can_be_fetched_for_elsewhere(
    hub: Hub, tiny_files: Files, quire: Run, tmp_path: Path
) -> None:
    hub.push("someone/model", tiny_files)
    settings = tmp_path / "quire.toml"
    settings.write_text("[cache]\nkv_budget = '900000GiB'\n")
    refused = quire("pull", "someone/model", "--config", settings)
    assert (refused.exit_code, "model.safetensors" in hub.sent_bytes) == (SETTINGS, False)
    assert refused.stderr.endswith("; --force fetches it all the same\n")
    assert refused.stderr.count("\n") == 1
    forced = quire("pull", "someone/model", "--config", settings, "--force")
    assert forced.exit_code == 0
    assert "this machine cannot serve it: " in forced.stdout
    assert find_model("someone/model").missing == ()


def test_offline_it_says_what_is_here_and_what_is_not(
    hub: Hub, tiny_files: Files, quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("someone/model", tiny_files)
    find_model("someone/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = quire("pull", "someone/model")
    assert result.exit_code == MODEL
    assert "HF_HUB_OFFLINE is set: unset it to download" in result.stderr
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = quire("pull", "someone/model", "--dry-run")
    assert "because the hub did not answer: " in result.stdout
    assert re.search(r"weights: (\d+ bytes) of \1 are to be fetched", result.stdout)


def test_a_folder_needs_no_pull(quire: Run, tiny_model: Path) -> None:
    result = quire("pull", tiny_model)
    assert result.exit_code == MODEL
    assert f"this is {tiny_model}, on this disk: nothing is to be done" in result.stderr


def test_a_plan_of_a_model_on_the_hub_fetches_no_weights(
    hub: Hub, tiny_files: Files, quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push("someone/model", tiny_files)
    result = quire("plan", "someone/model", "--context", "256")
    assert result.exit_code == 0, result.output
    assert re.search(r"\nnot here yet: (\d+ bytes) of \1 of weights; sizes are", result.stdout)
    assert "KV backend: " in result.stdout
    assert set(hub.sent_bytes) == {"config.json", "generation_config.json"}
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    again = quire("plan", "someone/model", "--context", "256")
    assert "because the hub did not answer" in again.stdout


def repository() -> Path:
    return Path(constants.HF_HUB_CACHE) / "models--someone--model"


@pytest.fixture
def two(hub: Hub, tiny_files: Files) -> tuple[str, str]:
    """Two commits of a model that share their weights; and another model."""
    old = hub.push("someone/model", tiny_files)
    find_model("someone/model").fetch_weights()
    new = hub.push("someone/model", tiny_files | {"notes.txt": b"news"})
    find_model("someone/model").fetch_weights()
    hub.push("other/model", tiny_files)
    find_model("other/model")
    return old, new


def test_all_of_a_model_goes_and_nothing_else(two: tuple[str, str], quire: Run) -> None:
    size = sum(file.stat().st_size for file in (repository() / "blobs").iterdir())
    result = quire("rm", "someone/model", "--yes")
    assert result.exit_code == 0, result.output
    assert f"{size} bytes come back." in result.stdout
    assert "which other programs use as well, such as mlx-lm, transformers" in result.stdout
    assert f"Removed someone/model: {size} bytes are free again." in result.stdout
    assert not repository().exists()
    assert find_model("other/model").folder.exists()


def test_a_pinned_commit_goes_and_the_others_keep_what_they_share(
    two: tuple[str, str], quire: Run
) -> None:
    old, new = two
    result = quire("rm", f"someone/model@{old}", "-y")
    assert "Its other commits stay, 1." in result.stdout
    freed = re.search(r"Removed someone/model: (\d+) bytes are free again", result.stdout)
    assert freed is not None
    weights = repository() / "snapshots" / new / "model.safetensors"
    assert int(freed[1]) < weights.stat().st_size
    assert [path.name for path in (repository() / "snapshots").iterdir()] == [new]
    assert find_model("someone/model").missing == ()


def test_what_has_arrived_of_a_download_goes_too(hub: Hub, tiny_files: Files, quire: Run) -> None:
    hub.push("someone/model", tiny_files)
    (file,) = find_model("someone/model").missing
    small = sum(path.stat().st_size for path in (repository() / "blobs").iterdir())
    file.part.write_bytes(b"12345")
    assert f"{small + 5} bytes come back" in quire("rm", "someone/model", "--yes").stdout
    assert not repository().exists()


@pytest.mark.parametrize(("answer", "gone"), [("n\n", False), ("", False), ("y\n", True)])
def test_it_asks_before(answer: str, gone: bool, two: tuple[str, str], own_log: None) -> None:
    result = CliRunner().invoke(app, ["rm", "someone/model"], input=answer)
    assert "Remove it? [y/N]" in result.stdout
    assert (result.exit_code == 0) is gone
    assert repository().exists() is not gone


def test_a_folder_that_is_not_the_hubs_is_never_touched(
    hub: Hub, tiny_model: Path, tmp_path: Path, quire: Run
) -> None:
    folder = tmp_path / "shelf/someone/own"
    shutil.copytree(tiny_model, folder)
    settings = tmp_path / "quire.toml"
    settings.write_text(f"[models]\nfolders = ['{tmp_path / 'shelf'}']\n")
    for name in (folder, "someone/own", "own"):
        result = quire("rm", name, "--yes", "--config", settings)
        assert result.exit_code == MODEL
        assert "removes nothing outside of the hub's cache: remove that folder" in result.stderr
    assert (folder / "model.safetensors").exists()


def test_what_is_not_there_is_said(hub: Hub, two: tuple[str, str], quire: Run) -> None:
    for name, problem in (
        ("someone/else", "it is not in the hub's cache"),
        ("someone/model@nowhere", "this commit is not in the hub's cache"),
    ):
        result = quire("rm", name, "--yes")
        assert (result.exit_code, problem in result.stderr) == (MODEL, True)
    shutil.rmtree(constants.HF_HUB_CACHE)
    assert "the hub's cache cannot be read" in quire("rm", "someone/model", "--yes").stderr


def test_a_repository_that_is_broken_is_left_to_the_person(
    two: tuple[str, str], quire: Run
) -> None:
    (repository() / "refs/main").write_text("0" * 40)
    shutil.rmtree(repository() / "snapshots" / two[0])
    result = quire("rm", "someone/model", "--yes")
    assert f"the hub's tools find it broken: remove {repository()} yourself" in result.stderr


def test_what_could_not_be_removed_is_said(
    two: tuple[str, str], quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeleteCacheStrategy, "execute", lambda _: None)
    result = quire("rm", "someone/model", "--yes")
    assert result.exit_code == MODEL
    assert "not all of it could be removed: whose files are these?" in result.stderr

    def refuse(_: DeleteCacheStrategy) -> None:
        raise OSError("Cannot call rmtree on a symbolic link")

    monkeypatch.setattr(DeleteCacheStrategy, "execute", refuse)
    assert "it cannot be removed: Cannot call" in quire("rm", "someone/model", "--yes").stderr


@pytest.fixture
def settings(tmp_path: Path, tiny_model: Path) -> Path:
    """With a folder of three models, and one that is not there."""
    shelf = tmp_path / "shelf"
    shutil.copytree(tiny_model, shelf / "someone/own")
    write_embedding_model(shelf / "vectors")
    write_model(shelf / "packed", bits=4)
    file = tmp_path / "quire.toml"
    file.write_text(f"[models]\nfolders = ['{shelf}', '/no/such/shelf']\n")
    return file


def test_all_models_of_this_disk_are_listed_with_what_this_machine_does_with_them(
    hub: Hub, tiny_files: Files, settings: Path, quire: Run
) -> None:
    hub.push("someone/half", tiny_files)
    find_model("someone/half")
    result = quire("models", "--config", settings)
    assert result.exit_code == 0
    assert result.stderr == "quire: models.folders: /no/such/shelf: there is no such folder\n"
    head, *rows, more = result.stdout.splitlines()
    assert re.split("  +", head)[-3:] == ["context", "lies in", "served here"]
    assert [row.split()[0] for row in rows] == ["packed", "someone/own", "vectors"]
    packed, own, vectors = rows
    assert "4-bit" in packed
    assert own.endswith("a folder          yes")
    assert vectors.endswith("embeddings")
    assert more == "Without weights on this disk: 1 more, `quire models --all`"
    head, *rows, _, reason = quire("list", "--all", "--config", settings).stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["packed", "someone/half", "someone/own", "vectors"]
    assert rows[1].endswith("hub's cache  no: see below")
    assert reason.startswith("someone/half: 1 file of weights is not here yet: `quire pull someone")


@pytest.mark.parametrize("arrived", [1, 7, 1000, 5000, 10_000])
def test_a_download_that_was_interrupted_is_listed_with_what_is_here(
    arrived: int, hub: Hub, tiny_files: Files, quire: Run
) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "b.safetensors"}}
    more: Files = {"model.safetensors.index.json": json.dumps(index).encode()}
    hub.push("someone/half", tiny_files | more | {"b.safetensors": b"12345"})
    found = find_model("someone/half")
    b, model = found.missing
    replace(found, missing=(b,)).fetch_weights()
    assert "5 bytes of" in quire("models").stdout
    model.part.write_bytes(b"." * arrived)
    (listed,) = json.loads(quire("models", "--json").stdout)["models"]
    assert listed["size_bytes"] == arrived + 5
    whole = model.size_bytes + 5
    assert (
        listed["reason"]
        == f"{gib(arrived + 5)} of {gib(whole)} are here: `quire pull someone/half` goes on"
    )


def tree(folder: Path) -> dict[Path, int]:
    """All files and folders with their times of change."""
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def test_lm_studios_models_are_used_and_left_as_they_are(
    hub: Hub, lm_studio: Path, tiny_files: Files, quire: Run
) -> None:
    before = tree(lm_studio)
    _, gguf, tiny, _, _, reason = quire("models").stdout.splitlines()
    assert re.split("  +", gguf)[1:] == ["-", "40 bytes", "gguf", "-", "LM Studio", "no: see below"]
    assert re.split("  +", tiny)[-2:] == ["LM Studio", "yes"]
    assert reason.startswith("bartowski/Tiny-GGUF, zed/Z-GGUF: this is GGUF, and quire reads safe")
    for name in ("mlx-community/Tiny-4bit", "tiny-4bit", "bartowski/tiny-gguf", "Tiny-GGUF"):
        shown = quire("show", name).stdout
        assert "  lies in      LM Studio\n" in shown
        assert f"  folder       {lm_studio}/" in shown
        result = quire("rm", name, "--yes")
        assert result.exit_code == MODEL
        assert "nothing outside of the hub's cache: remove it in LM Studio" in result.stderr
    assert "Tiny-GGUF: this is GGUF, and quire reads safe" in quire("plan", "Tiny-GGUF").stderr
    result = quire("pull", "tiny-4bit")
    assert f"this is {lm_studio}/mlx-community/Tiny-4bit, on this disk: nothing" in result.stderr
    hub.push("mlx-community/Tiny-4bit", tiny_files)
    cached = Path(constants.HF_HUB_CACHE) / "models--mlx-community--Tiny-4bit"
    snapshot_download("mlx-community/Tiny-4bit", endpoint=hub.url, cache_dir=constants.HF_HUB_CACHE)
    (next(cached.glob("snapshots/*/model.safetensors"))).unlink()
    assert "remove" in quire("rm", "mlx-community/tiny-4bit", "--yes").stdout.lower()
    assert not cached.exists(), "what is the hub's can go, though another copy is served"
    assert tree(lm_studio) == before


def test_models_are_told_programs_as_json(
    hub: Hub, tiny_files: Files, settings: Path, quire: Run
) -> None:
    hub.push("someone/half", tiny_files)
    find_model("someone/half")
    found = json.loads(quire("models", "--json", "--config", settings).stdout)["models"]
    assert [model["name"] for model in found] == ["packed", "someone/own", "vectors"]
    found = json.loads(quire("models", "--all", "--json", "--config", settings).stdout)["models"]
    packed, half, own, _ = found
    assert (half["lies_in"], own["lies_in"]) == ("hub's cache", "a folder")
    assert (own["name"], own["served"], own["reason"]) == ("someone/own", True, None)
    assert own["context"] > 0
    assert own["kv_bytes_per_token"] > 0
    assert (half["served"], half["context"]) == (False, None)
    assert "quire pull" in half["reason"]
    assert packed["quantization"] == "4-bit"
    assert set(own) == set(half)


@pytest.mark.parametrize("name", [*NAMES, "ev" + "il" * 120])
@pytest.mark.parametrize("model_type", ["a\nb", "\x1b[2J" * 9, "c" * 10**6])
def test_what_others_have_named_stays_in_its_row(
    name: str, model_type: str, tiny_model: Path, tmp_path: Path, hub: Hub, quire: Run
) -> None:
    folder = tmp_path / "shelf" / name
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    file = tmp_path / "quire.toml"
    file.write_text(f"[models]\nfolders = ['{tmp_path / 'shelf'}']\n")
    listed = quire("models", "--config", file).stdout
    assert all(line.isprintable() and len(line) < 3000 for line in listed.splitlines())
    assert [line[:2] for line in listed.split("\n")] == ["na", "ev", "", "ev", ""]
    shown = quire("show", folder, "--config", file).stdout
    assert shown.split("\n")[0].startswith("ev")
    assert all(line.isprintable() and len(line) < 3000 for line in shown.splitlines())
    refused = quire("serve", folder)
    assert refused.exit_code == MODEL
    assert all(line.startswith("quire: ") for line in refused.stderr.splitlines())
    assert len(refused.stderr) < 5000


def test_who_has_no_models_is_told_how_to_get_one(hub: Hub, quire: Run) -> None:
    result = quire("models")
    assert "`quire pull qwen3:0.6b` fetches a small one" in result.stdout
    assert json.loads(quire("models", "--json").stdout) == {"models": []}


def test_a_machine_that_is_too_small_is_the_reason(
    hub: Hub, tiny_model: Path, tmp_path: Path, quire: Run
) -> None:
    file = tmp_path / "quire.toml"
    file.write_text(f"[models]\nfolders = ['{tiny_model}']\n[cache]\nkv_budget = '900000GiB'\n")
    result = quire("models", "--config", file)
    assert "no: see below" in result.stdout
    assert "900000.00 GiB does not fit" in result.stdout


def test_a_model_is_shown_with_all_facts(hub: Hub, tiny_files: Files, quire: Run) -> None:
    old = hub.push("someone/model", tiny_files | {"1_Pooling/config.json": b"{}"})
    find_model("someone/model").fetch_weights()
    commit = hub.push("someone/model", tiny_files)
    found = find_model("someone/model")
    found.fetch_weights()
    text = quire("show", "model").stdout
    assert text.startswith("someone/model\n")
    for fact in (
        "qwen3, 0.14 million parameters, fp32, generates text",
        str(found.folder),
        f"  commit       {commit}",
        f"  others       {old}",
        "  served here  yes, ",
        "  model.safetensors  ",
    ):
        assert fact in text
    values = json.loads(quire("show", "someone/model", "--json").stdout)
    assert values["files"]["model.safetensors"] == values["size_bytes"]
    assert values["other_revisions"] == [old]
    assert json.loads(quire("show", f"someone/model@{old}", "--json").stdout)["revision"] == old


def test_a_folder_is_shown_with_its_reason(tiny_model: Path, tmp_path: Path, quire: Run) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt9"}')
    text = quire("show", folder).stdout
    assert "  served here  config.json: model_type is 'gpt9'" in text
    assert "- (the folder is not the hub's)" in text
    assert "  lies in      a folder\n" in text


@pytest.mark.parametrize("name", ["someone/else", "someone/model@other"])
def test_what_is_not_here_is_said_with_what_to_do(
    name: str, hub: Hub, tiny_files: Files, quire: Run
) -> None:
    hub.push("someone/model", tiny_files)
    find_model("someone/model")
    result = quire("show", name)
    assert result.exit_code == MODEL
    assert f"it is not on this disk: `quire pull {name}` fetches it" in result.stderr
