"""Fetch weights from the hub, and go on where a download has ended before.

The hub's client begins a file anew whenever its process has ended. Here what has arrived stays,
whatever ended the process, and the rest is asked for by its range of bytes; the checksum says
whether both fit together.
"""

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from huggingface_hub import hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from tqdm import tqdm

from server.catalogue.hub_answers import DownloadError
from server.catalogue.hub_cache import WeightFile, cache_folder, repository_folder

FILES_AT_ONCE = 4


def fetch_files(repository: str, commit: str, files: Sequence[WeightFile]) -> None:
    """Fetch files of a commit into the hub's cache, with one bar of progress. Raises DownloadError,
    and what the hub's client raises; what has arrived by then stays."""
    stopped = threading.Event()
    bar = tqdm(
        total=sum(file.size_bytes for file in files),
        initial=sum(file.here_bytes for file in files),
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc="downloading",
        disable=None,
        leave=False,
    )
    with bar, ThreadPoolExecutor(FILES_AT_ONCE) as pool:
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
    """Fetch a file, and link it into the commit's folder."""
    assert file.blob is not None
    lock = cache_folder() / ".locks" / repository_folder(repository).name / f"{file.blob.name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not file.blob.exists():
            _fetch_contents(hf_hub_url(repository, file.path, revision=commit), file, bar)
    # The contents are there: this only links them, as the hub's client does on this system.
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
            found = hashlib.file_digest(arrived, "sha256").hexdigest()
        if found != file.sha256:
            file.part.unlink()
            raise DownloadError(
                f"{file.path}: what has arrived has another checksum than the hub says, and was "
                "removed: pull it again"
            )
    file.part.replace(file.blob)


def _part_of(whole: "tqdm[Any]", file: WeightFile, stopped: threading.Event) -> Any:
    """Make the class of the progress bar that the hub's client makes for a file: all of them
    advance the whole bar. stopped: set where another file has failed."""
    begun, size_bytes = file.here_bytes, file.size_bytes

    class Part:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            # Less than what has begun where the hub sends the file from its beginning.
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
            """Close only this part: the whole goes on."""

        # What came over the wire, which may be less than what it makes, and rates of one file.
        update_transfer = set_postfix_str = set_transfer_postfix_str = lambda *_, **__: None

    return Part
