import hashlib
import json
import logging
import os
import shutil
from hashlib import sha256
from pathlib import Path
from threading import Event

import pytest

from engine.models import identity
from engine.models.identity import ModelIdentity, content_digest
from kvcache.user_folders import cache_folder
from tests.draft_heads import write_head
from tests.models import write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits until a file counts as settled."""
    monkeypatch.setattr(identity, "SETTLED_NS", -(10**9))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read, in their order."""
    found: list[str] = []
    hash_file = hashlib.file_digest

    def noted(stream, kind):  # type: ignore[no-untyped-def]
        found.append(Path(stream.name).name)
        return hash_file(stream, kind)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return found


def identity_of(folder: Path, arithmetic: str = "packed") -> bytes:
    return ModelIdentity(folder).digest(arithmetic)


def change_in_place(file: Path) -> None:
    """Turn the last bit of a file, and set its time back to what it was."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    with file.open("r+b") as stream:
        stream.write(content)
    after = before
    while after.st_ctime_ns == before.st_ctime_ns:  # the file system's clock ticks slowly
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = file.stat()
    assert (after.st_size, after.st_ino) == (before.st_size, before.st_ino)
    assert after.st_mtime_ns == before.st_mtime_ns


def test_a_copy_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = copy / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(dict(reversed(values.items())), indent=7))
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    assert identity_of(copy) == identity_of(folder)


def test_a_weight_that_is_changed_in_place_makes_another_model(folder: Path) -> None:
    before = identity_of(folder)
    assert identity_of(folder) == before
    change_in_place(folder / "model.safetensors")
    assert identity_of(folder) != before


def test_a_digest_that_is_kept_does_not_outlive_a_change_in_place(
    folder: Path, settled: None, hashed: list[str]
) -> None:
    before = identity_of(folder)
    change_in_place(folder / "model.safetensors")
    assert identity_of(folder) != before
    assert len(hashed) == 2


def test_another_config_makes_another_model(folder: Path) -> None:
    before = identity_of(folder)
    config = folder / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"rms_norm_eps": 2 * values["rms_norm_eps"]}))
    assert identity_of(folder) != before


def test_a_draft_head_and_its_file_make_another_model(folder: Path) -> None:
    """The head's K and V lie in the blocks."""
    write_head(folder)
    file = folder / "mtp.safetensors"
    digests = [identity_of(folder), ModelIdentity(folder, ()).digest("packed")]
    digests.append(ModelIdentity(folder, (file,)).digest("packed"))
    write_head(folder, seed=8)
    assert identity_of(folder) == digests[0]
    digests.append(ModelIdentity(folder, (file,)).digest("packed"))
    assert len(set(digests)) == 4


def test_another_arithmetic_makes_other_k_and_v(folder: Path) -> None:
    assert identity_of(folder, "packed") != identity_of(folder, "stored")


def test_a_file_is_read_once_for_all_starts(folder: Path, settled: None, hashed: list[str]) -> None:
    first = identity_of(folder)
    assert identity_of(folder) == first
    assert hashed == ["model.safetensors"]


def test_whether_a_digest_is_known_is_told_without_waiting_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, hash_file = Event(), content_digest
    monkeypatch.setattr(identity, "content_digest", lambda it: may_read.wait() and hash_file(it))
    found = ModelIdentity(folder)
    assert not found.is_known(0.01)
    may_read.set()
    assert found.is_known(20.0)


def test_a_file_that_has_just_been_written_is_read_again(folder: Path, hashed: list[str]) -> None:
    identity_of(folder)
    identity_of(folder)
    assert len(hashed) == 2
    assert not cache_folder().exists()


def test_a_file_that_changes_while_it_is_read_is_read_again(
    folder: Path, settled: None, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "model.safetensors"
    hash_file = hashlib.file_digest

    def changing(stream, kind):  # type: ignore[no-untyped-def]
        digest = hash_file(stream, kind)
        change_in_place(file)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", changing)
        old = content_digest(file)
    assert content_digest(file) == sha256(file.read_bytes()).hexdigest() != old


@pytest.mark.parametrize("record", ["{", "[]", '{"version": 1}'])
def test_a_record_that_is_damaged_is_not_heeded(record: str, folder: Path, settled: None) -> None:
    file = folder / "model.safetensors"
    content_digest(file)
    (kept,) = cache_folder().iterdir()
    kept.write_text(record)
    assert content_digest(file) == sha256(file.read_bytes()).hexdigest()


def test_what_the_hubs_client_has_fetched_is_known_by_its_name(
    tmp_path: Path, hashed: list[str]
) -> None:
    plain = write_model(tmp_path / "plain")
    cached = shutil.copytree(plain, tmp_path / "cached" / "snapshots" / "1")
    file = cached / "model.safetensors"
    blobs = tmp_path / "cached" / "blobs"
    blobs.mkdir()
    blob = file.rename(blobs / sha256(file.read_bytes()).hexdigest())
    file.symlink_to(blob)
    found = identity_of(cached)
    assert hashed == []
    assert found == identity_of(plain)


@pytest.mark.parametrize("homeless", [False, True])
def test_a_digest_that_cannot_be_kept_is_found_all_the_same(
    homeless: bool,
    folder: Path,
    settled: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if homeless:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", nobody)
    else:
        cache_folder().parent.write_text("a file")
    caplog.set_level(logging.INFO)
    file = folder / "model.safetensors"
    assert content_digest(file) == sha256(file.read_bytes()).hexdigest()
    (said,) = caplog.messages
    assert said.startswith(f"the next start reads {file} again: ")


def test_weights_that_cannot_be_read_have_no_identity(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    found = ModelIdentity(folder)
    with pytest.raises(IsADirectoryError):
        found.digest("packed")
