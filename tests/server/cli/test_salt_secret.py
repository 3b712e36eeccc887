import os
from pathlib import Path

import pytest

from kvcache.block_hashes import PrefixSalt
from kvcache.user_folders import state_folder
from server.chat.salts import Salts
from server.cli import serve
from server.cli.salt_secret import kept_secret, read_salts
from server.cli.serve import serve_model
from server.cli.settings import read_settings
from server.routes.service import Service
from tests.server.commands import SETTINGS, SMALL, Run, one_sentence

NOT_KEPT = "the secret of the salts ends with this process"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, own_log: None) -> list[Service]:
    """Whatever would have been served, instead of serving it."""
    found: list[Service] = []
    monkeypatch.setattr(serve, "listen", lambda _, service, *__: found.append(service))
    return found


@pytest.fixture
def kept() -> Path:
    """Where the secret is kept unless a setting names another place."""
    return state_folder() / "salt-secret"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that a setting names, and that is not there yet."""
    return tmp_path / "secrets" / "salts"


def salts_of(services: list[Service]) -> list[PrefixSalt]:
    return [service.salts.salt("key", "salt") for service in services]


# --- servers ---------------------------------------------------------------------------------


def test_a_server_that_is_started_again_makes_the_same_salts(
    tiny_model: Path, served: list[Service], kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        serve_model(str(tiny_model), read_settings(None, SMALL))
    one, other = salts_of(served)
    assert one == other
    assert one.may_be_written
    assert NOT_KEPT not in capsys.readouterr().err
    assert kept.stat().st_size == 32
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert list(kept.parent.iterdir()) == [kept], "nothing is left of how it was made"


def test_servers_share_the_file_that_their_settings_name(
    tiny_model: Path, served: list[Service], file: Path, kept: Path
) -> None:
    for named in (file, file, file.with_name("others")):
        flags = SMALL | {"access": {"salt_secret_file": str(named)}}
        serve_model(str(tiny_model), read_settings(None, flags))
    one, replica, stranger = salts_of(served)
    assert one == replica
    assert one.tenant != stranger.tenant
    assert one.client != stranger.client
    assert not kept.exists()


@pytest.mark.parametrize(
    ("homeless", "why"), [(False, "Not a directory"), (True, "determine home directory")]
)
def test_a_server_that_can_keep_nothing_says_so_once_and_serves(
    homeless: bool,
    why: str,
    tiny_model: Path,
    served: list[Service],
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if homeless:
        monkeypatch.delenv("XDG_STATE_HOME")
        monkeypatch.setattr(Path, "home", nobody)
    else:
        kept.parent.parent.parent.mkdir(exist_ok=True)
        kept.parent.parent.write_text("a file where a folder should be")
    for _ in range(2):
        serve_model(str(tiny_model), read_settings(None, SMALL))
        log = capsys.readouterr().err
        assert log.count(NOT_KEPT) == 1
        assert why in log
        assert "setting access.salt_secret_file names one that can" in log
    one, other = salts_of(served)
    assert one.tenant != other.tenant
    assert not one.may_be_written, "nobody could find it again"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_secret_that_others_may_use_is_refused(
    mode: int, quire: Run, tiny_model: Path, file: Path
) -> None:
    kept_secret(file)
    file.chmod(mode)
    line = one_sentence(
        quire("serve", tiny_model, "--set", f"access.salt_secret_file={file}"), SETTINGS
    )
    assert line == (
        f"quire: {file}: it keeps a secret, and others may use it (mode {mode:o}): `chmod 600` it, "
        "or delete it for a new one"
    )


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_file_that_holds_something_else_is_refused(
    size: int, quire: Run, tiny_model: Path, kept: Path
) -> None:
    kept.parent.mkdir(parents=True)
    kept.touch(mode=0o600)
    kept.write_bytes(bytes(size))
    line = one_sentence(quire("serve", tiny_model), SETTINGS)
    assert line.startswith(f"quire: {kept}: it should hold a secret of 32 bytes, and nothing else")
    assert kept.stat().st_size == size, "it may be somebody's"


def test_a_file_that_is_set_and_cannot_be_had_is_refused(
    quire: Run, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    named = tmp_path / "file" / "salts"
    line = one_sentence(
        quire("serve", tiny_model, "--set", f"access.salt_secret_file={named}"), SETTINGS
    )
    assert line.startswith("quire: setting access.salt_secret_file: ")
    assert str(named) in line


# --- the file --------------------------------------------------------------------------------


def test_of_two_that_make_it_at_once_both_have_the_same(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def overtaken(made: str, where: Path) -> None:
        where.touch(mode=0o600)
        where.write_bytes(b"f" * 32)
        link(made, where)

    monkeypatch.setattr(os, "link", overtaken)
    assert kept_secret(file) == kept_secret(file) == b"f" * 32


def test_the_group_may_read_what_somebody_else_gave_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = kept_secret(file)
    file.chmod(0o440)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    assert kept_secret(file) == secret


def test_a_path_may_begin_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    salts = read_salts(Path("~/salts"))
    kept = Salts((tmp_path / "salts").read_bytes())
    assert kept.salt("key", "salt") == salts.salt("key", "salt")
