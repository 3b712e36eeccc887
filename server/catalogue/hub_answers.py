"""What a hub says, checked before it becomes a path, takes memory or fills the disk.

A hub may be anybody's (``HF_ENDPOINT``), and its own client takes what it says on trust.
"""

import re
from collections.abc import Iterable, Iterator

import httpx2
from huggingface_hub import set_client_factory
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import default_client_factory

MAX_LISTING_BYTES = 32 << 20
MAX_SMALL_FILE_BYTES = 64 << 20
API = "/api/"
COMMIT = re.compile(r"[0-9a-f]{40}")
# Of Git, and of contents: files are called by them.
CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
ETAG = re.compile(r'(W/)?"?[0-9A-Za-z][0-9A-Za-z._-]{0,127}"?')


class DownloadError(Exception):
    """A download that did not come to its end; one sentence."""


def check_commit(commit: str | None) -> str:
    """Return the name of a commit. Raises DownloadError for what is none."""
    if commit is None or not COMMIT.fullmatch(commit):
        raise DownloadError(f"the hub's answer names the commit {commit!r}, which is none")
    return commit


def check_files(files: Iterable[RepoFile]) -> list[RepoFile]:
    """Return files as a hub lists them. Raises DownloadError for one that would be written to
    another place than its own."""
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


class _Listing(httpx2.SyncByteStream):
    """The bytes of an answer, up to a limit."""

    def __init__(self, answer: httpx2.Response) -> None:
        assert isinstance(answer.stream, httpx2.SyncByteStream)
        self._stream = answer.stream

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for part in self._stream:
            size += len(part)
            if size > MAX_LISTING_BYTES:
                limit = MAX_LISTING_BYTES >> 20
                raise DownloadError(f"the hub's answer has more than {limit} MiB")
            yield part

    def close(self) -> None:
        self._stream.close()


def check_answer(answer: httpx2.Response) -> None:
    """Check an answer's head, and limit what is read of it. Raises DownloadError."""
    if answer.request.url.path.startswith(API):
        if "content-encoding" in answer.headers:  # quire asks for none: unpacked it may be any size
            raise DownloadError("the hub's answer is compressed")
        answer.stream = _Listing(answer)
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
