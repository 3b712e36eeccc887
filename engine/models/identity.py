"""Identifies a model by its content: equal identities mean equal K and V, wherever files lie."""

import hashlib
import json
import logging
import os
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from engine.models.config import ModelConfig
from engine.models.safetensors_headers import weight_files
from kvcache.user_folders import cache_folder

log = logging.getLogger(__name__)

HASHING_THREADS = 4
# The name of a file in the hub's cache, to which snapshots link: its SHA-256.
BLOB_NAME = re.compile(r"[0-9a-f]{64}")
# Two changes within a tick of the file system's clock leave the same times: a digest is kept only
# of a file that has not changed for longer than any such tick.
SETTLED_NS = 2_000_000_000


class ModelIdentity:
    """The identity of a folder's model, found while its weights are loaded.

    All bytes of the weights count: a sample would not see what was changed in place. SHA-256 takes
    a second for 1 to 2 GB, about what loading takes, so it runs beside that. Then the digest is
    kept; of what the hub's client has fetched it is known.
    """

    def __init__(self, folder: Path) -> None:
        """Begin to read, on threads of its own. Raises CheckpointError."""
        self._config = json.dumps(ModelConfig(folder).values, sort_keys=True)
        pool = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="identity")
        self._digests: list[Future[str]] = [
            pool.submit(content_digest, file) for file in weight_files(folder)
        ]
        pool.shutdown(wait=False)

    def digest(self, arithmetic: str) -> bytes:
        """Return the identity, once all files are read. arithmetic: of the products of weights.
        Raises OSError."""
        digests = sorted(future.result() for future in self._digests)
        return sha256(json.dumps([arithmetic, self._config, *digests]).encode()).digest()


def content_digest(file: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits; kept in the user's cache folder for as
    long as the file is the same. Raises OSError."""
    file = file.resolve()
    if file.parent.name == "blobs" and BLOB_NAME.fullmatch(file.name):
        return file.name
    began_ns = time.time_ns()
    with file.open("rb") as stream:
        version = _version(os.fstat(stream.fileno()))
        kept = _read_record(file)
        if kept.get("version") == version:
            return str(kept["sha256"])
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        settled = version["ctime_ns"] + SETTLED_NS < began_ns
        if settled and _version(os.fstat(stream.fileno())) == version:
            _write_record(file, {"version": version, "sha256": digest})
    return digest


def _version(status: os.stat_result) -> dict[str, int]:
    """Return the fields that change with a file's content. Its owner can set mtime back, but not
    ctime."""
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _record(file: Path) -> Path:
    """Return where the digest of a file is kept. Raises RuntimeError for a user without a home."""
    return cache_folder() / f"weights-{sha256(os.fsencode(file)).hexdigest()[:16]}.json"


def _read_record(file: Path) -> dict[str, object]:
    try:
        record = json.loads(_record(file).read_text())
    except (OSError, ValueError, RuntimeError):
        return {}
    return record if isinstance(record, dict) else {}


def _write_record(file: Path, record: dict[str, object]) -> None:
    try:
        path = _record(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))  # half of it would be no JSON
    except (OSError, RuntimeError) as error:
        log.info("the next start reads %s again: its digest cannot be kept: %s", file, error)
