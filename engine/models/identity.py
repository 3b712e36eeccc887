"""Computes a digest of a model's content. Models with equal digests compute equal K and V."""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.models.config import ModelConfig
from engine.models.safetensors_headers import weight_files
from kvcache.backends.faults import read_record, write_record
from kvcache.user_folders import cache_folder

log = logging.getLogger(__name__)

HASHING_THREADS = 4
# In the Hugging Face cache, a weight file's name is its SHA-256.
BLOB_NAME = re.compile(r"[0-9a-f]{64}")
# A digest is cached only if the file has not changed for longer than this time, because a second
# change within one tick of the file system's clock would leave the file's times unchanged.
SETTLED_NS = 2_000_000_000


class ModelIdentity:
    """Hashes all bytes of a folder's weights while the weights are loaded, because SHA-256 takes
    about as long as loading. Later starts reuse the digests of files."""

    def __init__(self, folder: Path, draft_files: Sequence[Path] | None = None) -> None:
        """Begin to hash the weights' files on other threads. ``draft_files`` are further files with
        the served draft head, and None without such a head. Raises CheckpointError."""
        self._config = json.dumps(ModelConfig(folder).values, sort_keys=True)
        self._head = [] if draft_files is None else ["draft head"]
        pool = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="identity")
        files = [*weight_files(folder), *(draft_files or ())]
        self._digests: list[Future[str]] = [pool.submit(content_digest, file) for file in files]
        pool.shutdown(wait=False)

    def is_known(self, timeout_s: float) -> bool:
        """Return True if all files are hashed within this time, as they are by cached digests."""
        return not wait(self._digests, timeout_s).not_done

    def digest(self, arithmetic: str) -> bytes:
        """Return the model's digest, from all files' hashes and ``arithmetic``. Raises OSError."""
        digests = sorted(future.result() for future in self._digests)
        parts = [arithmetic, self._config, *self._head, *digests]
        return sha256(json.dumps(parts).encode()).digest()


def content_digest(file: Path) -> str:
    """Return a file's SHA-256, from a cache if the file is unchanged. Raises OSError."""
    file = file.resolve()
    if file.parent.name == "blobs" and BLOB_NAME.fullmatch(file.name):
        return file.name
    name, began_ns = f"weights-{sha256(os.fsencode(file)).hexdigest()[:16]}.json", time.time_ns()
    with file.open("rb") as stream:
        version = _version(os.fstat(stream.fileno()))
        kept = _read_record(name)
        if kept.get("version") == version:
            return str(kept["sha256"])
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        settled = version["ctime_ns"] + SETTLED_NS < began_ns
        if settled and _version(os.fstat(stream.fileno())) == version:
            try:
                os.close(write_record(name, {"version": version, "sha256": digest})[1])
            except (OSError, RuntimeError) as error:  # a RuntimeError: there is no home folder
                log.info("the next start reads %s again: its digest is not kept: %s", file, error)
    return digest


def _version(status: os.stat_result) -> dict[str, int]:
    """Return file attributes that change with the content. (A program cannot set ctime back.)"""
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _read_record(name: str) -> dict[str, Any]:
    try:
        return read_record(cache_folder() / name)
    except RuntimeError:
        return {}
