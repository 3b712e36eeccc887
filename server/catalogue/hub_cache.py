"""The Hugging Face hub's cache on this disk, which other programs share.

It has a folder for each repository, ``models--org--name``, with files by their checksums in
``blobs``, links to them in ``snapshots/COMMIT``, and the commits of branches in ``refs``
(huggingface.co/docs/huggingface_hub, "Understand caching"). It is read here and not by
``scan_cache_dir``, which leaves out what it finds broken and gives up where one folder may not be
read: these are what people want to hear about.
"""

import os
import re
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import constants, get_cached_repo_tree
from huggingface_hub.errors import CachedRepoTreeNotFoundError

from engine.models.safetensors_headers import CheckpointError, read_index, regular_size
from server.catalogue.names import GGUF, ModelNotFoundError

REPOSITORY, BLOBS = "models--", "blobs"
MAIN = "main"
WEIGHTS = "model*.safetensors"
# A commit has 40.
MAX_REF_CHARS = 64
SHA256 = re.compile(r"[0-9a-f]{64}")
# Other programs' partial files may have holes, so quire has its own, with a suffix that the hub's
# tools take for a download's as well.
PART_SUFFIX = ".quire.incomplete"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights as a repository lists it."""

    path: str
    size_bytes: int
    blob: Path | None
    """The file of its contents, named by their checksum; None where only the hub knows it."""

    @property
    def part(self) -> Path:
        """Return the file of its contents while they arrive."""
        assert self.blob is not None
        return self.blob.with_name(self.blob.name + PART_SUFFIX)

    @property
    def sha256(self) -> str | None:
        """Return the checksum of its contents, in hexadecimal digits; None where the hub has
        another kind."""
        assert self.blob is not None
        return self.blob.name if SHA256.fullmatch(self.blob.name) else None

    @property
    def here_bytes(self) -> int:
        """Return the number of bytes that have arrived."""
        if self.blob is None:
            return 0
        if self.blob.exists():
            return self.size_bytes
        part = self.part
        return part.stat().st_size if part.exists() else 0


def cache_folder() -> Path:
    """Return the folder of the cache that the environment gives the hub's client."""
    return Path(constants.HF_HUB_CACHE).expanduser()


def cached_repositories() -> Iterator[str]:
    for folder in folders_in(cache_folder()):
        if folder.name.startswith(REPOSITORY):
            yield folder.name.removeprefix(REPOSITORY).replace("--", "/")


def repository_folder(repository: str) -> Path:
    """Return the folder of a repository, which need not exist."""
    return cache_folder() / f"{REPOSITORY}{repository.replace('/', '--')}"


def snapshot_of(repository: str, revision: str) -> Path | None:
    """Return the folder of a commit, or of a branch's or tag's last one; None where it is not
    here."""
    snapshots = repository_folder(repository) / "snapshots"
    for commit in (revision, _commit_of(repository, revision)):
        if commit and (snapshots / commit).is_dir():
            return snapshots / commit
    return None


def best_snapshot(repository: str) -> Path | None:
    """Return the folder of the commit to serve without asking the hub: a complete one before
    others, then main's, then the newest. None without a commit."""
    main = _commit_of(repository, MAIN)

    def rank(snapshot: Path) -> tuple[bool, bool, float]:
        complete = not lacks_weights(repository, snapshot)
        return complete, snapshot.name == main, snapshot.stat().st_mtime

    snapshots = folders_in(repository_folder(repository) / "snapshots")
    return max(snapshots, key=rank, default=None)


def move_branch(repository: str, branch: str, commit: str) -> None:
    """Point the cache's branch to a commit, for programs without a network."""
    if _commit_of(repository, branch) == commit:
        return
    file = repository_folder(repository) / "refs" / branch
    new = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):  # a cache that may only be read stays as it is
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(commit, encoding="utf-8")
        new.replace(file)


def listed_weights(repository: str, snapshot: Path) -> dict[str, int] | None:
    """Return the files of weights that a repository has at a commit, and their bytes, from the
    cached listing; None without a listing. snapshot: the commit's folder, whose index may name
    some. Raises ModelNotFoundError where the repository has none, and CheckpointError."""
    try:
        listed = get_cached_repo_tree(repository, revision=snapshot.name)
    except CachedRepoTreeNotFoundError:
        return None
    named = set(read_index(snapshot).values())
    weights = {file.path: file.size for file in listed if is_weights(file.path, named)}
    if not weights:
        has_gguf = any(file.path.endswith(".gguf") for file in listed)
        reason = GGUF if has_gguf else f"the repository has no {WEIGHTS} file"
        raise ModelNotFoundError(f"{repository}: {reason}")
    return weights


def is_weights(path: str, named: Set[str]) -> bool:
    """Return whether a file of a repository is one of weights. named: files that the index
    names."""
    return "/" not in path and (fnmatchcase(path, WEIGHTS) or path in named)


def missing_weights(repository: str | None, folder: Path) -> list[str]:
    """Return the files of weights that a folder lacks, by the hub's listing, else by its own index.
    repository: the one whose commit it is. Raises ModelNotFoundError and CheckpointError."""
    listed = listed_weights(repository, folder) if repository else None
    named = set(read_index(folder).values()) if listed is None else set(listed)
    return sorted(file for file in named if not (folder / file).exists())


def lacks_weights(repository: str, snapshot: Path) -> bool:
    """Return whether a commit has no weights here, or not all of them."""
    try:
        missing = missing_weights(repository, snapshot)
    except (CheckpointError, ModelNotFoundError):
        return True
    # A link may lead nowhere.
    return bool(missing) or not any(file.exists() for file in snapshot.glob("*.safetensors"))


def folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, without hidden ones; none where it may not be read."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    return [path for path in entries if not path.name.startswith(".") and path.is_dir()]


def _commit_of(repository: str, branch: str) -> str | None:
    """Return a branch's commit in the cache; None where it has none."""
    try:
        file = repository_folder(repository) / "refs" / branch
        regular_size(file)
        with file.open(encoding="utf-8") as stream:
            return stream.read(MAX_REF_CHARS).strip()
    except (OSError, ValueError):
        return None
