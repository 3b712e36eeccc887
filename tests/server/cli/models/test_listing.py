"""``quire models`` and ``quire show``."""

import json
import shutil
from pathlib import Path

import pytest

from server.catalogue.hub import find_model
from tests.models import write_embedding_model, write_model
from tests.server.cli.test_log import NAMES
from tests.server.commands import MODEL, Run
from tests.server.hub_server import Files, Hub


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
    head, *rows, _, reason = result.stdout.splitlines()
    assert head.split() == ["name", "family", "size", "packed", "context", "served", "here"]
    assert [row.split()[0] for row in rows] == ["packed", "someone/half", "someone/own", "vectors"]
    packed, half, own, vectors = rows
    assert "4-bit" in packed
    assert half.endswith("no: see below")
    assert own.endswith("yes")
    assert vectors.endswith("embeddings")
    assert reason.startswith("someone/half: 1 file of weights is not here yet: `quire pull someone")


def test_models_are_told_programs_as_json(
    hub: Hub, tiny_files: Files, settings: Path, quire: Run
) -> None:
    hub.push("someone/half", tiny_files)
    find_model("someone/half")
    found = json.loads(quire("models", "--json", "--config", settings).stdout)["models"]
    packed, half, own, _ = found
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
    assert len(refused.stderr.splitlines()) == 1
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


@pytest.mark.parametrize("name", ["someone/else", "someone/model@other"])
def test_what_is_not_here_is_said_with_what_to_do(
    name: str, hub: Hub, tiny_files: Files, quire: Run
) -> None:
    hub.push("someone/model", tiny_files)
    find_model("someone/model")
    result = quire("show", name)
    assert result.exit_code == MODEL
    assert f"it is not on this disk: `quire pull {name}` fetches it" in result.stderr
