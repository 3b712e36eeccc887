"""Finds a model's files: in a local folder, or in a repository of the Hugging Face hub.

The small files of a commit are fetched first, so that the caller can check whether the model can be
served before the weights are fetched. The branch in the local cache moves to the commit only after
the last file, so that offline programs still find the older commit after an unfinished download."""

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, get_cached_repo_tree, get_token, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm

from kvcache.budget import gib
from server.catalogue.download import (
    COMMIT,
    MAX_SMALL_FILE_BYTES,
    DownloadError,
    check_commit,
    check_files,
    fetch_files,
)
from server.catalogue.folder_reader import FolderReader
from server.catalogue.foreign_files import ADAPTER_FILE, SNAPSHOTS
from server.catalogue.hub_cache import (
    BLOBS,
    MAIN,
    WeightFile,
    best_snapshot,
    cache_folder,
    is_head,
    listed_weights,
    move_branch,
    repository_folder,
    snapshot_of,
)
from server.catalogue.local_models import Place
from server.catalogue.lookup import known_names, look_up
from server.catalogue.names import ModelNotFoundError, nearest

SMALL_FILES = ("*.json", "*.jinja", "*.txt")
# Patterns of the files that contain a model's kind, size and task.
CONFIG_FILES = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "modules.json"),
    *("*/config.json", ADAPTER_FILE),
)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder on this disk, in which weights may still be missing."""

    asked: str
    """The model's name as the user wrote it."""
    name: str
    """The repository ``org/name``, or the name of the folder."""
    folder: Path
    on_hub: bool = False
    """False for a folder outside the hub's cache."""
    branch: str | None = None
    """The branch or tag on the hub that points to the folder's commit."""
    missing: tuple[WeightFile, ...] = ()
    weights_bytes: int = 0
    """Size of all weights, missing or not. It is 0 if no weights are missing."""
    notice: str = ""
    """A log message about the use of the cache, with the reason. Empty if none is needed."""

    @property
    def missing_bytes(self) -> int:
        return sum(file.size_bytes - file.here_bytes for file in self.missing)

    @property
    def misses_head(self) -> bool:
        """Return True if a draft head is missing that lies beside the weights."""
        return any(is_head(file.path) for file in self.missing)

    def fetch_small_files(self) -> None:
        """Download all needed files except the weights. Raises ModelNotFoundError."""
        try:
            _fetch_matching(self.name, self.folder.name, SMALL_FILES)
        except Exception as error:
            raise not_given(self.asked, self.name, error) from error

    def fetch_weights(self) -> None:
        """Download the missing weights. Raises ModelNotFoundError for any failure."""
        check_room(self.asked, self.missing_bytes)
        try:
            commit, names = self.folder.name, [file.path for file in self.missing]
            fetch_files(self.name, commit, _weight_files(self.name, commit, names))
        except Exception as error:
            raise not_given(self.asked, self.name, error) from error
        self.follow_branch()

    def follow_branch(self) -> None:
        """Point the branch in the local cache to this commit, whose files are complete."""
        if self.branch is not None:
            move_branch(self.name, self.branch, self.folder.name)


def find_model(
    name: str,
    folders: Sequence[Path] = (),
    *,
    files: Sequence[str] = SMALL_FILES,
    reader: FolderReader | None = None,
) -> FoundModel:
    """Find a model by name, and download those of its files that match the patterns ``files``. If
    the hub does not answer, search the local cache. ``folders`` and ``reader`` are passed to
    ``look_up``. A reader without drafts wants no draft head. Raises ModelNotFoundError."""
    place = look_up(name, folders, reader)
    if place.folder is not None:
        return FoundModel(name, place.name, place.folder)
    try:
        commit = _commit(place)
        folder = _fetch_matching(place.name, commit, files)
        branch = (place.revision or MAIN) if commit != place.revision else None
        heads = reader is None or reader.drafts
        model = _with_missing(FoundModel(name, place.name, folder, True, branch), heads=heads)
    except ModelNotFoundError:
        raise
    except (RevisionNotFoundError, DownloadError) as error:
        raise not_given(name, place.name, error) from error
    except Exception as error:
        return _cached(name, place, error)
    if not model.missing and files == SMALL_FILES:
        model.follow_branch()
    return model


def _fetch_matching(repository: str, commit: str, patterns: Sequence[str]) -> Path:
    """Download a commit's files that match ``patterns``, and return the commit's folder. Raises
    DownloadError, ModelNotFoundError and the errors of the hub's client."""
    try:
        listed = check_files(get_cached_repo_tree(repository, revision=commit))
    except CachedRepoTreeNotFoundError:
        listed = _listed(repository, commit)
    sizes = {file.path: file.size for file in listed}
    small = list(filter_repo_objects(sizes, allow_patterns=list(patterns)))
    for path in small:
        if sizes[path] > MAX_SMALL_FILE_BYTES:
            raise DownloadError(f"{path}: it has {sizes[path]} bytes, and is no file of weights")
    folder = repository_folder(repository) / SNAPSHOTS / commit
    missing_bytes = sum(sizes[path] for path in small if not (folder / path).exists())
    check_room(repository, missing_bytes)
    with disable_progress_bars():
        return Path(
            snapshot_download(
                repository,
                revision=commit,
                allow_patterns=list(patterns),
                tqdm_class=_bar_up_to(len(small) + missing_bytes),
            )
        )


def _bar_up_to(limit: int) -> type[tqdm]:
    """Return a progress bar class that raises DownloadError beyond ``limit``, the number of bytes
    plus the number of files: the hub's client counts both on such bars."""

    class Bar(tqdm):
        arrived = 0.0

        def update(self, n: float | None = 1) -> bool | None:
            self.arrived += n or 0
            if self.arrived > limit:
                raise DownloadError("more arrives than the hub announced")
            return super().update(n)

    return Bar


def _listed(repository: str, commit: str) -> list[RepoFile]:
    """Get the list of a commit's files. Raises DownloadError and errors of the hub's client."""
    listed = HfApi().list_repo_tree(repository, revision=commit, recursive=True)
    return check_files(file for file in listed if isinstance(file, RepoFile))


def check_room(name: str, missing_bytes: int) -> None:
    """Raise ModelNotFoundError if the disk has no room for the missing files."""
    cache = cache_folder()
    free = free_bytes(next(folder for folder in (cache, *cache.parents) if folder.exists()))
    if missing_bytes > free:
        raise ModelNotFoundError(
            f"{name}: {gib(missing_bytes)} are to be fetched, and the disk of {cache} has "
            f"{gib(free)} left: make room (`quire models` shows what is here), or have "
            "HF_HUB_CACHE name a folder on another disk"
        )


def _commit(place: Place) -> str:
    revision = place.revision or MAIN
    if COMMIT.fullmatch(revision):
        return revision
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    info = HfApi().model_info(place.name, revision=revision, timeout=timeout)
    return check_commit(info.sha)


def _cached(name: str, place: Place, error: Exception) -> FoundModel:
    """Find a model in the local cache. ``error`` is the reason why the hub gave no answer."""
    repository, revision = place.name, place.revision
    folder = snapshot_of(repository, revision) if revision else best_snapshot(repository)
    if folder is None:
        raise not_given(name, repository, error) from error
    notice = ""
    if not isinstance(error, OfflineModeIsEnabled):
        notice = (
            f"{name}: commit {folder.name[:12]} of the cache is taken, because the hub did not "
            f"answer: {_first_line(error)}"
        )
    model = FoundModel(name, repository, folder, on_hub=True, notice=notice)
    return _with_missing(model, is_cached=True)


def _with_missing(model: FoundModel, *, is_cached: bool = False, heads: bool = False) -> FoundModel:
    """Return the model with ``missing`` and ``weights_bytes`` set from the hub's cached list.
    ``is_cached`` is True if the hub did not answer. With ``heads``, draft heads count as weights.
    """
    listed = listed_weights(model.name, model.folder)
    if listed is None:
        return model  # without a list of files, the cached files are taken as all files
    if heads:
        tree = get_cached_repo_tree(model.name, revision=model.folder.name)
        listed |= {file.path: file.size for file in tree if is_head(file.path)}
    names = [name for name in listed if not (model.folder / name).exists()]
    if not names:
        return model
    if is_cached:
        files = tuple(WeightFile(name, listed[name], None) for name in sorted(names))
    else:
        files = _weight_files(model.name, model.folder.name, names)
    return replace(model, missing=files, weights_bytes=sum(listed.values()))


def _weight_files(repository: str, commit: str, names: Collection[str]) -> tuple[WeightFile, ...]:
    """Get the weight files' checksums from the hub, since the cached list of files lacks them."""
    blobs = repository_folder(repository) / BLOBS
    listed = {file.path: file for file in _listed(repository, commit)}
    weights = []
    for file in (listed[name] for name in sorted(names)):
        checksum = file.blob_id if file.lfs is None else file.lfs.sha256
        weights.append(WeightFile(file.path, file.size, blobs / checksum))
    return tuple(weights)


def not_given(name: str, repository: str, error: Exception) -> ModelNotFoundError:
    """Return an error that explains to the user why the hub gave no files."""
    page = f"{constants.ENDPOINT}/{repository}"
    if not name.startswith(repository):
        name = f"{name} ({repository})"
    if isinstance(error, GatedRepoError):
        how = (
            "then set HF_TOKEN to a token of yours, or run `hf auth login`"
            if get_token() is None
            else "the account of the token that is set has not been let in yet"
        )
        return ModelNotFoundError(
            f"{name}: the model is gated: accept its licence at {page}; {how}"
        )
    what = f"{name}: there is no such folder, and "
    if isinstance(error, RevisionNotFoundError):
        what = f"{name}: the repository has no such branch, tag or commit: see {page}"
    elif isinstance(error, RepositoryNotFoundError):
        near = nearest(repository, {*known_names()} - {repository})
        what += (
            "the hub does not have it, or it is private: then set HF_TOKEN or run `hf auth login`"
            f"{f'; did you mean {near}?' if near else ''}"
        )
    elif OfflineModeIsEnabled in (type(error), type(error.__cause__)):
        what = (
            f"{name}: not all of it is in {cache_folder()}, and HF_HUB_OFFLINE is set: unset it to "
            "download"
        )
    elif isinstance(error, httpx2.ConnectError | httpx2.TimeoutException):
        what += f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}): are you online?"
    else:
        what += f"the hub failed: {_first_line(error)}"
    return ModelNotFoundError(what)


def model_names(model: FoundModel, alias: str | None) -> tuple[str, ...]:
    """Return all names that clients may use for a model. The first name is the model's id."""
    names = model.name, model.folder.name, model.asked, str(model.folder)
    return tuple(dict.fromkeys(([alias] if alias else []) + [*names]))


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
