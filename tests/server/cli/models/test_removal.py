"""``quire rm``: what comes back, and what stays."""

import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import DeleteCacheStrategy, constants
from typer.testing import CliRunner

from server.catalogue.hub import find_model
from server.cli.commands import app
from tests.server.commands import MODEL, Run
from tests.server.hub_server import Files, Hub


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
