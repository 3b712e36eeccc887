"""Downloads weights from the hub, resumes broken downloads, and checks the hub's answers.

The hub's own client downloads a file again from the beginning after its process has ended. quire
keeps received bytes, downloads the missing ones, and compares the file's checksum. The hub may be
any server (``HF_ENDPOINT``): answers are checked before they become paths, or fill the memory."""

import hashlib
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from logging import CRITICAL, getLogger
from typing import Any

import httpx2
from huggingface_hub import hf_hub_download, hf_hub_url, set_client_factory
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils._http import default_client_factory
from tqdm import tqdm

from kvcache.budget import gib
from server.catalogue.hub_cache import WeightFile, cache_folder, repository_folder
from server.interrupts import interrupt_says

FILES_AT_ONCE = 4
# A progress bar appears after this many seconds.
BAR_DELAY_S = 1.0
MAX_LISTING_BYTES = 32 << 20
MAX_SMALL_FILE_BYTES = 64 << 20
API = "/api/"
COMMIT = re.compile(r"[0-9a-f]{40}")
# Matches a checksum: git's SHA-1, or a SHA-256. It becomes a file name, and so is checked.
CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
ETAG = re.compile(r'(W/)?"?[0-9A-Za-z][0-9A-Za-z._-]{0,127}"?')


class DownloadError(Exception):
    """Raised if a download has failed. The text is one sentence for the user."""


def check_commit(commit: str | None) -> str:
    """Return ``commit``. Raises DownloadError if it is not the hash of a commit."""
    if commit is None or not COMMIT.fullmatch(commit):
        raise DownloadError(f"the hub's answer names the commit {commit!r}, which is none")
    return commit


def check_files(files: Iterable[RepoFile]) -> list[RepoFile]:
    """Return the files that the hub lists. Raises DownloadError for a path outside the repository,
    a malformed checksum or a negative size."""
    checked = list(files)
    for file in checked:
        parts = file.path.split("/")
        if not file.path.isprintable() or "\\" in file.path or {"", ".", ".."} & {*parts}:
            raise DownloadError(f"the hub's answer names the file {file.path!r}, which is none")
        for checksum in (file.blob_id, file.lfs.sha256 if file.lfs else file.blob_id):
            if not CHECKSUM.fullmatch(checksum):
                raise DownloadError(f"{file.path}: the hub's checksum is {checksum!r}")
        if file.size < 0:
            raise DownloadError(f"{file.path}: the hub says that it has {file.size} bytes")
    return checked


def check_answer(answer: httpx2.Response) -> None:
    """Check the headers of a hub's answer, and read a list of files, whose size has a limit. Raises
    DownloadError."""
    if answer.request.url.path.startswith(API):
        if "content-encoding" in answer.headers:  # refused: it may decompress to any size
            raise DownloadError("the hub's answer is compressed")
        assert isinstance(answer.stream, httpx2.SyncByteStream)
        listing = bytearray()
        with closing(answer.stream) as parts:
            for part in parts:
                listing += part
                if len(listing) > MAX_LISTING_BYTES:
                    limit = MAX_LISTING_BYTES >> 20
                    raise DownloadError(f"the hub's answer has more than {limit} MiB")
        answer.stream = httpx2.ByteStream(bytes(listing))
        return
    if commit := answer.headers.get("x-repo-commit"):
        check_commit(commit)
    for name in ("etag", "x-linked-etag"):
        etag = answer.headers.get(name)
        if etag is not None and not ETAG.fullmatch(etag):
            raise DownloadError(f"the hub's answer names contents {etag!r}")


def _client() -> httpx2.Client:
    client = default_client_factory()
    client.headers["accept-encoding"] = "identity"
    client.event_hooks = {**client.event_hooks, "response": [check_answer]}
    return client


set_client_factory(_client)
# quire itself reports the errors of the hub's client, in one sentence each.
getLogger("huggingface_hub").setLevel(CRITICAL)


def bytes_bar(what: str, done: int = 0, total: int | None = None) -> "tqdm[Any]":
    """Make a progress bar for a number of bytes. It is shown on terminals only, and not at once."""
    units: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    return tqdm(
        desc=what, initial=done, total=total, disable=None, leave=False, delay=BAR_DELAY_S, **units
    )


def fetch_files(repository: str, commit: str, files: Sequence[WeightFile]) -> None:
    """Download files of a commit into the hub's cache, with one progress bar. Raises DownloadError
    and the errors of the hub's client. Bytes that came before an error stay on the disk."""
    stopped, size_bytes = threading.Event(), sum(file.size_bytes for file in files)
    bar = bytes_bar("downloading", sum(file.here_bytes for file in files), size_bytes)

    def kept() -> str:
        here_bytes = sum(file.here_bytes for file in files)
        return (
            f"ended by Ctrl-C; {gib(here_bytes)} of {gib(size_bytes)} are kept, and the same "
            "command goes on from there"
        )

    with bar, interrupt_says(kept), ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        jobs = [
            pool.submit(_fetch, repository, commit, file, _part_of(bar, file, stopped))
            for file in files
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch(repository: str, commit: str, file: WeightFile, bar: Any) -> None:
    """Download a file's contents (blob) into the cache, and link them in the commit's folder."""
    assert file.blob is not None
    lock = cache_folder() / ".locks" / repository_folder(repository).name / f"{file.blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not file.blob.exists():
            _fetch_contents(hf_hub_url(repository, file.path, revision=commit), file, bar)
    # The blob is complete, so that the hub's client only makes the link.
    hf_hub_download(repository, file.path, revision=commit, tqdm_class=bar)


def _fetch_contents(url: str, file: WeightFile, bar: Any) -> None:
    assert file.blob is not None
    file.part.parent.mkdir(parents=True, exist_ok=True)
    with file.part.open("ab") as stream:
        if stream.tell() > file.size_bytes:
            stream.truncate(stream.seek(0))
        http_get(
            url,
            stream,
            resume_size=stream.tell(),
            headers=build_hf_headers(),
            expected_size=file.size_bytes,
            tqdm_class=bar,
        )
    if file.sha256 is not None:
        with file.part.open("rb") as arrived:
            digest = hashlib.file_digest(arrived, "sha256").hexdigest()
        if digest != file.sha256:
            file.part.unlink()
            raise DownloadError(
                f"{file.path}: what has arrived has another checksum than the hub says, and was "
                "removed: pull it again"
            )
    file.part.replace(file.blob)


def _part_of(whole: "tqdm[Any]", file: WeightFile, stopped: threading.Event) -> Any:
    """Make the hub client's progress bar class for one file. Its objects advance ``whole``, the bar
    of all files. The event ``stopped`` is set after another file has failed."""
    begun, size_bytes = file.here_bytes, file.size_bytes

    class Part:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            # The hub may send the whole file, although quire requested only the missing bytes.
            whole.update(initial - begun)
            self._left: float = size_bytes - initial

        def __enter__(self) -> "Part":
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def update(self, count: float | None = 1) -> None:
            if stopped.is_set():
                raise DownloadError("another file has failed")
            self._left -= count or 0
            if self._left < 0:
                raise DownloadError(
                    f"{file.path}: more arrives than the {size_bytes} bytes that the hub announced"
                )
            whole.update(count)

        def close(self) -> None:
            """Do nothing: the bar of all files stays open."""

        # These ignore what the hub's client reports: bytes before decompression, and a file's rate.
        update_transfer = set_postfix_str = set_transfer_postfix_str = lambda *_, **__: None

    return Part
