"""The secret from which salts are derived; a salt hides one client's cached prefixes from other
clients. A file keeps the secret, so that restarts and replicas derive the same salts."""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import structlog

from kvcache.user_folders import state_folder
from server.chat.salts import Salts
from server.config import SettingError

SECRET_BYTES = 32
SETTING = "access.salt_secret_file"

log = structlog.get_logger("quire")


def read_salts(setting: Path | None) -> Salts:
    """Read the secret, or create it. setting: the secret's file; None means a file in the user's
    state folder, or no file if that folder cannot be used. Raises SettingError if other users may
    read the file, if the file does not hold a secret, or if ``setting`` cannot be used."""
    try:
        file = (setting or state_folder() / "salt-secret").expanduser()
        return Salts(kept_secret(file), outlives_process=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        if setting is not None:
            raise SettingError(f"setting {SETTING}: {error}") from error
        log.warning(
            "the secret of the salts ends with this process, and no prefix is kept on disk, as no "
            f"file can keep it: {error}; setting {SETTING} names one that can"
        )
        return Salts(secrets.token_bytes(SECRET_BYTES))


def kept_secret(file: Path) -> bytes:
    try:
        return _read(file)
    except FileNotFoundError:
        _make(file)
        return _read(file)


def _read(file: Path) -> bytes:
    with file.open("rb") as stream:
        status = os.fstat(stream.fileno())
        secret = stream.read(SECRET_BYTES + 1)
    # In containers the file may belong to another user, and to the group of this process.
    others = 0o077 if status.st_uid == os.geteuid() else 0o007
    if status.st_mode & others:
        mode = stat.S_IMODE(status.st_mode)
        raise SettingError(
            f"{file}: it keeps a secret, and others may use it (mode {mode:o}): `chmod 600` it, or "
            "delete it for a new one"
        )
    if len(secret) != SECRET_BYTES:
        raise SettingError(
            f"{file}: it should hold a secret of {SECRET_BYTES} bytes, and nothing else: delete it "
            "for a new one"
        )
    return secret


def _make(file: Path) -> None:
    """Create the file atomically for this user alone, unless another process has just done so."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, prefix=".new-") as draft:
        draft.write(secrets.token_bytes(SECRET_BYTES))
        draft.flush()
        os.fsync(draft.fileno())
        with suppress(FileExistsError):
            os.link(draft.name, file)
