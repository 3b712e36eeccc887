"""Folders of hostile models cost a verdict, once, and no other model."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from engine.models.safetensors_headers import CheckpointError
from kvcache.child import Limits
from server.catalogue import folder_reader
from server.catalogue.folder_reader import FolderReader, folder_state
from server.catalogue.local_models import check_folder, local_models, template_facts
from tests.hostile_models import HOSTILE, spoil
from tests.server.conftest import ThisProcess

SHORT = Limits(2.0, 2.0, 2 << 30)
# What can be served, if by nobody who is in a hurry.
MERELY_SLOW = {"10**6 tokens that end", "300,000 packed layers"}
# Only a reader of the tokenizer sees them.
OF_THE_TOKENIZER = {
    "a token of id 2**31",
    "tokens of ids with gaps",
    "100,000 added tokens",
    "a tokenizer of 200 GB",
    "a tokenizer without tokens",
}


@pytest.fixture(autouse=True)
def nothing_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no cache"))


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[FolderReader]:
    """Reads in a process of its own, which a hostile folder may end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_reader, "LIMITS", SHORT)
        with FolderReader() as reader:
            yield reader


@pytest.fixture
def hostile(tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return spoil(tiny_model, tmp_path / "hostile", request.param)


@pytest.mark.usefixtures("folders_are_read_elsewhere")
@pytest.mark.parametrize(
    ("hostile", "kind"), [(kind, kind) for kind in HOSTILE], indirect=["hostile"]
)
def test_a_hostile_folder_is_judged_within_limits_and_once(
    hostile: Path, kind: str, elsewhere: FolderReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    (model,) = local_models([hostile], hub=False, reader=elsewhere)
    assert (model.name, model.size_bytes >= 0) == ("hostile", True)
    if kind not in MERELY_SLOW | OF_THE_TOKENIZER:
        assert model.problem is not None
        assert (model.checkpoint, len(model.problem) <= 1000) == (None, True)
    refused: AbstractContextManager[object] = suppress(CheckpointError)
    if kind not in MERELY_SLOW:
        refused = pytest.raises(CheckpointError, match=str(hostile))
    with refused:
        elsewhere.read(check_folder, hostile, None, None, True)
    assert time.monotonic() - began < 60
    monkeypatch.setattr(elsewhere, "process", None)
    assert local_models([hostile], hub=False, reader=elsewhere) == (model,), "it is remembered"


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are read from now on."""
    seen: list[str] = []
    call = ThisProcess.call

    def noted(self: Any, limits: Limits, work: Any, folder: str, *arguments: Any) -> Any:
        seen.append(Path(folder).name)
        return call(self, limits, work, folder, *arguments)

    monkeypatch.setattr(ThisProcess, "call", noted)
    return seen


@pytest.mark.parametrize(
    "change",
    [
        lambda f: (f / "config.json").write_text("{}"),
        lambda f: (f / "generation_config.json").unlink(),
        lambda f: (f / "more.txt").touch(),
        lambda f: os.utime(f / "tokenizer.json", ns=(1, 1)),
        lambda f: shutil.copy(f / "model.safetensors", f / "model-2.safetensors"),
        lambda f: ((f / "1_Pooling").mkdir(), (f / "1_Pooling/config.json").touch()),
    ],
)
def test_a_folder_is_read_again_where_a_file_has_changed_and_else_not(
    change: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        shutil.copytree(tiny_model, tmp_path / name)
    seen, reader = reads(monkeypatch), FolderReader()
    for _ in range(3):
        with reader:
            local_models([tmp_path], hub=False, reader=reader)
    assert seen == ["one", "other"]
    change(tmp_path / "one")
    with reader:
        local_models([tmp_path], hub=False, reader=reader)
    assert seen == ["one", "other", "one"]


def test_a_repository_is_read_again_where_something_has_come(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    repository = tmp_path / "no cache/models--someone--tiny"
    shutil.copytree(tiny_model, repository / "snapshots" / ("a" * 40))
    seen, reader = reads(monkeypatch), FolderReader()
    for _ in range(2):
        with reader:
            (model,) = local_models([], reader=reader)
    assert (model.problem, seen) == (None, ["models--someone--tiny"])
    (repository / "blobs").mkdir()
    (repository / "blobs/part.incomplete").touch()
    with reader:
        local_models([], reader=reader)
    assert len(seen) == 1, "contents count where a commit has them"
    os.mkfifo(repository / "snapshots" / ("a" * 40) / "config.json.lock")
    with reader:
        (model,) = local_models([], reader=reader)
    assert model.problem == f"snapshots/{'a' * 40}/config.json.lock: this is no regular file"
    assert (model.folder, model.revision) == (repository, "")


def test_what_is_no_part_of_a_model_may_be_anything(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_model, folder)
    before = folder_state(folder)
    for place in (".git", "a/b/c/d"):
        (folder / place).mkdir(parents=True)
        os.mkfifo(folder / place / "pipe")
    (folder / "lost").symlink_to("nowhere")
    assert folder_state(folder) == before


def test_a_folder_of_very_many_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_reader, "MAX_FILES", 3)
    for number in range(3):
        (tmp_path / str(number)).touch()
    assert len(folder_state(tmp_path)) == 3
    (tmp_path / "more").touch()
    with pytest.raises(CheckpointError, match="it has more than 3 files"):
        folder_state(tmp_path)


def test_a_broken_template_is_told_as_its_tokenizer_says_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    with FolderReader() as reader:
        assert reader.read(template_facts, tiny_model)[:2] == [True, True]
        with pytest.raises(CheckpointError) as caught:
            reader.read(template_facts, tmp_path)
    assert str(caught.value) == f"{tmp_path}/tokenizer.json: the file does not exist"
