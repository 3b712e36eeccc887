"""``quire rm``: remove models from the hub's cache, and from nowhere else."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CachedRevisionInfo, DeleteCacheStrategy, HFCacheInfo, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from kvcache.memory_budget import gib
from server.catalogue.hub_cache import PART_SUFFIX, cache_folder, repository_folder, snapshot_of
from server.catalogue.lookup import InFolder, look_up
from server.cli.model_files import ModelError, model_errors
from server.cli.settings import read_settings


@dataclass(frozen=True, slots=True)
class Removal:
    """Commits of a repository that are going to be removed."""

    repository: str
    commits: tuple[str, ...]
    folder: Path
    """The folder that is removed."""
    freed_bytes: int
    kept: int
    """Commits of the repository that stay."""
    strategy: DeleteCacheStrategy

    def text(self) -> str:
        """Describe the removal for a confirmation."""
        commits = ", ".join(commit[:12] for commit in self.commits)
        others = f" Its other commits stay, {self.kept}." if self.kept else ""
        return (
            f"{self.repository}, commit {commits}: {gib(self.freed_bytes)} come back.{others}\n"
            f"It lies in {cache_folder()}, which other programs use as well, such as mlx-lm, "
            "transformers, vLLM and LM Studio: they would fetch it again."
        )

    def execute(self) -> str:
        """Remove it, and return a sentence. Raises ModelError."""
        assert self.folder.is_relative_to(cache_folder().resolve())
        try:
            self.strategy.execute()
        except OSError as error:
            raise ModelError(f"{self.folder}: it cannot be removed: {error}") from error
        if self.folder.exists():
            raise ModelError(
                f"{self.folder}: not all of it could be removed: whose files are these?"
            )
        return f"Removed {self.repository}: {gib(self.freed_bytes)} are free again."


def find_removal(name: str, file: Path | None) -> Removal:
    """Find the commits of a name in the hub's cache. Raises StartError for a model that is not
    there, or in another folder."""
    settings = read_settings(file, {})
    with model_errors():
        place = look_up(name, settings.models.folders)
    if isinstance(place, InFolder):
        raise ModelError(
            f"{name}: it lies in {place.folder}, and quire removes nothing outside of the hub's "
            "cache: remove that folder yourself"
        )
    pinned = snapshot_of(place.repository, place.revision) if place.revision else None
    if place.revision and pinned is None:
        raise ModelError(f"{name}: this commit is not in the hub's cache, {cache_folder()}")
    cache = _scan(name)
    all_commits = _commits(name, place.repository, cache)
    chosen = [its for its in all_commits if pinned is None or its.commit_hash == pinned.name]
    strategy = cache.delete_revisions(*(its.commit_hash for its in chosen))
    repository = repository_folder(place.repository).resolve()
    whole = len(chosen) == len(all_commits)
    parts = repository.glob(f"blobs/*{PART_SUFFIX}") if whole else ()
    return Removal(
        place.repository,
        tuple(its.commit_hash for its in chosen),
        repository if whole else chosen[0].snapshot_path,
        strategy.expected_freed_size + sum(part.stat().st_size for part in parts),
        len(all_commits) - len(chosen),
        strategy,
    )


def _scan(name: str) -> HFCacheInfo:
    try:
        return scan_cache_dir(cache_folder())
    except (CacheNotFound, OSError, ValueError) as error:
        raise ModelError(f"{name}: the hub's cache cannot be read: {error}") from error


def _commits(name: str, repository: str, cache: HFCacheInfo) -> list[CachedRevisionInfo]:
    """Return the commits of a repository that are here. Raises ModelError where none is."""
    for found in cache.repos:
        if (found.repo_type, found.repo_id) == ("model", repository) and found.revisions:
            return sorted(found.revisions, key=lambda its: its.last_modified)
    folder = repository_folder(repository)
    if folder.exists():
        raise ModelError(f"{name}: the hub's tools find it broken: remove {folder} yourself")
    raise ModelError(f"{name}: it is not in the hub's cache, {cache_folder()}")
