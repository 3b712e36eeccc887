"""Reads the Hugging Face hub's cache on this disk, which other programs share.

A repository's folder ``models--org--name`` holds the files' contents (blobs) in ``blobs``, named by
checksum; links to the blobs in ``snapshots/COMMIT``; and each branch's commit in ``refs``
(huggingface.co/docs/huggingface_hub, "Understand caching"). The hub's ``scan_cache_dir`` hides
broken repositories and stops at an unreadable folder, so quire reads the cache itself."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from engine.models.draft_head import BELOW
from engine.models.safetensors_headers import INDEX_FILE, CheckpointError, read_index, regular_size
from server.catalogue.foreign_files import SNAPSHOTS, foreign_weights
from server.catalogue.names import MAX_WORD_CHARS, ModelNotFoundError, printable

REPOSITORY, BLOBS = "models--", "blobs"
MAIN = "main"
WEIGHTS = "model*.safetensors"
# Where a head that drafts lies if the index leaves it out. A model is complete without it.
HEADS = ("mtp*.safetensors", *BELOW)
# Limit for reading a file in ``refs``, which holds a commit's hash of 40 characters.
MAX_REF_CHARS = 64
SHA256 = re.compile(r"[0-9a-f]{64}")
# Suffix of quire's own partial files, which the hub's tools take for unfinished downloads. quire
# does not resume other programs' partial files, since these may have holes.
PART_SUFFIX = ".quire.incomplete"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights in the hub's list of a repository's files."""

    path: str
    size_bytes: int
    blob: Path | None
    """The file in ``blobs``, named by its checksum, or None if only the hub has the checksum."""

    @property
    def part(self) -> Path:
        """The file into which the blob's bytes are written during the download."""
        assert self.blob is not None
        return self.blob.with_name(self.blob.name + PART_SUFFIX)

    @property
    def sha256(self) -> str | None:
        """The blob's SHA-256 in hexadecimal, or None if the hub gives another kind of checksum."""
        assert self.blob is not None
        return self.blob.name if SHA256.fullmatch(self.blob.name) else None

    @property
    def here_bytes(self) -> int:
        """Number of the file's bytes that are on this disk."""
        if self.blob is None:
            return 0
        if self.blob.exists():
            return self.size_bytes
        part = self.part
        return part.stat().st_size if part.exists() else 0


def cache_folder() -> Path:
    """Return the hub's cache folder, which environment variables such as HF_HOME set."""
    return Path(constants.HF_HUB_CACHE).expanduser()


def cached_repositories() -> Iterator[str]:
    for folder in folders_in(cache_folder()):
        if folder.name.startswith(REPOSITORY):
            yield folder.name.removeprefix(REPOSITORY).replace("--", "/")


def part_bytes(repository: str) -> int:
    """Return how many bytes have arrived of files whose download is not complete."""
    parts = repository_folder(repository).glob(f"{BLOBS}/*{PART_SUFFIX}")
    return sum(part.stat().st_size for part in parts)


def repository_folder(repository: str) -> Path:
    """Return the folder of a repository in the cache, whether the folder exists or not."""
    return cache_folder() / f"{REPOSITORY}{repository.replace('/', '--')}"


def snapshot_of(repository: str, revision: str) -> Path | None:
    """Return the folder of a revision (commit, branch or tag); None if it is not cached."""
    snapshots = repository_folder(repository) / SNAPSHOTS
    for commit in (revision, _commit_of(repository, revision)):
        if commit and (snapshots / commit).is_dir():
            return snapshots / commit
    return None


def best_snapshot(repository: str) -> Path | None:
    """Return the folder of the best cached commit, or None if no commit is cached. Prefer complete
    commits to incomplete ones, then the commit of the branch main, then newer commits."""
    main = _commit_of(repository, MAIN)

    def rank(snapshot: Path) -> tuple[bool, bool, float]:
        complete = not lacks_weights(repository, snapshot)
        return complete, snapshot.name == main, snapshot.stat().st_mtime

    snapshots = folders_in(repository_folder(repository) / SNAPSHOTS)
    return max(snapshots, key=rank, default=None)


def move_branch(repository: str, branch: str, commit: str) -> None:
    """Point a branch in the cache to a commit, so that programs find the commit offline."""
    if _commit_of(repository, branch) == commit:
        return
    file = repository_folder(repository) / "refs" / branch
    new = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):  # if the cache is read-only, the branch stays unchanged
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(commit, encoding="utf-8")
        new.replace(file)


def listed_weights(repository: str, snapshot: Path) -> dict[str, int] | None:
    """Return ``{path: bytes}`` of the weight files in the commit's folder ``snapshot``, or None if
    the hub's list of files is not cached. Raises CheckpointError, ModelNotFoundError."""
    from huggingface_hub import get_cached_repo_tree  # imports the hub's client

    try:
        listed = get_cached_repo_tree(repository, revision=snapshot.name)
    except CachedRepoTreeNotFoundError:
        return None
    named = set(read_index(snapshot).values())
    top = {file.path: file.size for file in listed if "/" not in file.path}
    weights = {name: top[name] for name in top if fnmatchcase(name, WEIGHTS) or name in named}
    if lost := sorted(named - weights.keys()):
        raise ModelNotFoundError(
            f"{repository}: {INDEX_FILE} names files of weights that the repository does not have, "
            f"{len(lost)} of {len(named)}, such as {printable(lost[0], MAX_WORD_CHARS)}"
        )
    if not weights:
        reason = foreign_weights(snapshot, (file.path for file in listed))
        reason = reason or f"the repository has no {WEIGHTS} file"
        raise ModelNotFoundError(f"{repository}: {reason}")
    return weights


def is_head(path: str) -> bool:
    """Return True if a repository's file may have a draft head that the index leaves out."""
    return any(path.count("/") == place.count("/") and fnmatchcase(path, place) for place in HEADS)


def missing_weights(repository: str | None, folder: Path) -> list[str]:
    """Compare a folder with the hub's cached list of files; without a list, with the folder's index
    file. Return the missing weight files. Raises ModelNotFoundError, CheckpointError."""
    listed = listed_weights(repository, folder) if repository else None
    named = set(read_index(folder).values()) if listed is None else set(listed)
    return sorted(file for file in named if not (folder / file).exists())


def lacks_weights(repository: str, snapshot: Path) -> bool:
    """Return True if a cached commit lacks some or all weights."""
    try:
        missing = missing_weights(repository, snapshot)
    except (CheckpointError, ModelNotFoundError):
        return True
    # exists() is False for a link to a missing blob.
    return bool(missing) or not any(file.exists() for file in snapshot.glob("*.safetensors"))


def folders_in(folder: Path) -> list[Path]:
    """Return a folder's visible subfolders, or an empty list if the folder is unreadable."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    return [path for path in entries if not path.name.startswith(".") and path.is_dir()]


def _commit_of(repository: str, branch: str) -> str | None:
    """Return the commit of a branch, or None if the cache does not contain the branch."""
    try:
        file = repository_folder(repository) / "refs" / branch
        regular_size(file)
        with file.open(encoding="utf-8") as stream:
            return stream.read(MAX_REF_CHARS).strip()
    except (OSError, ValueError):
        return None
