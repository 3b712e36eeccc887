"""``quire cache``, beside a server that has the same folder open."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvcache.tier.index import Record
from kvcache.tier.store import RecordStore, TierLimits
from kvcache.tier.tier import tenant_tag
from kvcache.user_folders import prefixes_folder
from metal_ext import StateMemory
from server.cli.salt_secret import read_salts
from tests.server.commands import SETTINGS, Run, one_sentence

NBYTES = 3 << 20
HUB, OTHER, UNNAMED = b"h" * 16, b"o" * 16, b"u" * 16
NAMES = {
    HUB: "/home/me/hub/models--org--name/snapshots/0123abcd",
    OTHER: "/models/my-model",
}
RECORDS = ((HUB, ""), (HUB, "sk-mine"), (OTHER, "sk-mine"), (UNNAMED, ""))


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


@pytest.fixture
def folder() -> Path:
    return prefixes_folder(None)


@pytest.fixture
def running(folder: Path) -> Iterator[RecordStore]:
    """A server's store, which has written RECORDS."""
    memory, salts = StateMemory(NBYTES), read_salts(None)
    with closing(RecordStore(folder, TierLimits(1 << 30))) as store:
        for tag, name in NAMES.items():
            store.name_model(tag, name)
        for number, (model, key) in enumerate(RECORDS):
            tenant = tenant_tag(salts.salt(key, None).tenant)
            record = Record(key_of(number), model, tenant, NBYTES, 1.0, 0)
            store.write([(record, lambda file: memory.write_record(0, NBYTES, file, 0))])
        yield store


def left(store: RecordStore) -> set[int]:
    store.refresh()
    return {n for n in range(len(RECORDS)) if store.find(key_of(n)) is not None}


@pytest.mark.parametrize(
    ("hourly", "shown"),
    [
        ("8GiB", "8.00 GiB"),
        ("1GiB", "1.00 GiB"),
        ("64MiB", "64.00 MiB"),
        ("100GiB", "100.00 GiB"),
        ("0", "0 bytes"),
    ],
)
def test_what_lies_on_disk_is_shown_by_model(
    hourly: str,
    shown: str,
    quire: Run,
    running: RecordStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_CACHE__DISK_PER_HOUR", hourly)
    monkeypatch.setenv("QUIRE_CACHE__DISK", "16GiB")
    result = quire("cache", "show")
    assert result.exit_code == 0
    head, *rows, totals, where, warning = result.stdout.splitlines()
    assert head.split() == ["name", "records", "size", "last", "used"]
    assert [row.split()[:3] for row in rows] == [
        ["org/name", "2", "6.00"],
        ["my-model", "1", "3.00"],
        [UNNAMED.hex()[:8], "1", "3.00"],
    ]
    assert totals == (
        f"12.00 MiB of 16.00 GiB at most, 12.00 MiB of {shown} written in an hour, "
        "12.00 MiB of 40.00 GiB in a day"
    )
    assert where == str(folder)
    assert "has the model can turn them back into text" in warning


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), set()),
        (("--model", "org/name"), {2, 3}),
        (("--key", "sk-mine"), {0, 3}),
        (("--key", ""), {1, 2}),
        (("--key", "sk-other"), {0, 1, 2, 3}),
        (("--model", "my-model", "--key", "sk-mine"), {0, 1, 3}),
    ],
)
@pytest.mark.parametrize("limit", ["0", "16GiB"])
def test_a_clearing_removes_what_it_names_while_a_server_runs(
    options: tuple[str, ...],
    kept: set[int],
    limit: str,
    quire: Run,
    running: RecordStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_CACHE__DISK", limit)
    result = quire("cache", "clear", *options)
    removed = len(RECORDS) - len(kept)
    size = f"{3 * removed}.00 MiB" if removed else "0 bytes"
    assert result.stdout == f"{folder}: removed {removed} records, {size}\n"
    assert left(running) == kept
    files = {file.name for file in (folder / "records").glob("*/*")}
    assert files == {key_of(number).hex() for number in kept}


def test_a_model_that_has_nothing_is_no_reason_to_remove_all(
    quire: Run, running: RecordStore
) -> None:
    line = one_sentence(quire("cache", "clear", "--model", "nome"), SETTINGS)
    assert line.startswith("quire: nome: nothing of it is on disk, which has 75757575, my-model, ")
    assert len(left(running)) == len(RECORDS)


@pytest.mark.parametrize(
    ("broken", "lost"),
    [({1}, set()), (set(), {0}), (set(), {3}), ({1}, {2}), ({0, 3}, {1}), (set(), {0, 1, 2, 3})],
)
def test_broken_and_lost_records_are_reported_and_removed(
    broken: set[int], lost: set[int], quire: Run, running: RecordStore, folder: Path
) -> None:
    assert quire("cache", "verify").exit_code == 0
    for number in broken | lost:
        (file,) = (folder / "records").glob(f"*/{key_of(number).hex()}")
        if number in lost:
            file.unlink()
        else:
            os.truncate(file, NBYTES - 1)
    result = quire("cache", "verify")
    assert result.exit_code == 1
    whole = {0, 1, 2, 3} - broken - lost
    removed = f"{4 - len(whole)} were broken or lost and are removed"
    assert result.stdout == f"{len(whole)} records are whole, {removed}, 0 are unreadable\n"
    assert left(running) == whole
    assert quire("cache", "verify").exit_code == 0


def test_a_folder_that_is_not_there_is_not_made(quire: Run, folder: Path) -> None:
    assert quire("cache", "show").stdout == f"{folder}: nothing is kept here\n"
    assert quire("cache", "clear").stdout == f"{folder}: there was nothing to remove\n"
    assert quire("cache", "verify").exit_code == 0
    assert not folder.exists()


@pytest.mark.parametrize("configured", ["", "elsewhere"])
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("show",), "{folder}"),
        (("clear",), "{folder}: removed 4 records, 12.00 MiB"),
        (("clear", "--key", ""), "{folder}: removed 2 records, 6.00 MiB"),
        (("verify",), "4 records are whole"),
    ],
)
def test_the_folder_of_a_servers_flag_is_that_of_the_same_flag(
    command: tuple[str, ...],
    said: str,
    configured: str,
    quire: Run,
    running: RecordStore,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    if configured:
        monkeypatch.setenv("QUIRE_CACHE__DISK_FOLDER", str(tmp_path / configured))
    result = quire("cache", *command, "--disk-folder", str(folder))
    assert result.exit_code == 0
    assert said.format(folder=folder) in result.stdout


@pytest.mark.parametrize("command", ["show", "clear", "verify"])
@pytest.mark.parametrize("place", ["variable", "flag", "file"])
def test_an_empty_name_of_the_folder_means_the_usual_one(
    command: str,
    place: str,
    quire: Run,
    running: RecordStore,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "settings.toml"
    settings.write_text('[cache]\ndisk_folder = ""\n' if place == "file" else "")
    if place == "variable":
        monkeypatch.setenv("QUIRE_CACHE__DISK_FOLDER", "")
    flag = ("--disk-folder", "") if place == "flag" else ()
    result = quire("cache", command, "--config", str(settings), *flag)
    named = "4 records are whole" if command == "verify" else str(folder)
    assert named in result.stdout
    assert left(running) == (set() if command == "clear" else {0, 1, 2, 3})
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("command", ["show", "clear", "verify"])
def test_a_folder_that_cannot_be_used_is_named(
    command: str, quire: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "file"
    named.touch()
    monkeypatch.setenv("QUIRE_CACHE__DISK_FOLDER", str(named))
    line = one_sentence(quire("cache", command), SETTINGS)
    assert line.startswith(f"quire: setting cache.disk_folder: {named}")
