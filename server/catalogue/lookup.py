"""Resolves a model's name to a folder or to a repository on the hub."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from server.catalogue.folder_reader import FolderReader
from server.catalogue.local_models import LocalModel, local_models
from server.catalogue.names import (
    DEMO,
    DEMO_ID,
    GGUF,
    ModelNotFoundError,
    has_gguf_alone,
    is_hub_id,
    split_revision,
    why_not,
)
from server.shipped import ALIASES_FILE, DEMO_MODEL, shipped


@dataclass(frozen=True, slots=True)
class InFolder:
    """A model in a folder outside the hub's cache."""

    name: str
    """The folder's name, or ``org/name`` two levels below one of models.folders."""
    folder: Path


@dataclass(frozen=True, slots=True)
class OnHub:
    """A repository on the hub. If ``revision`` (branch, tag or commit) is None, main is meant."""

    repository: str
    revision: str | None


@cache
def aliases() -> dict[str, str]:
    """Return ``{short name: repository}`` of the short names that quire ships."""
    text = shipped(ALIASES_FILE).read_text(encoding="utf-8")
    names: dict[str, str] = tomllib.loads(text)["aliases"]
    return names


def look_up(
    name: str, folders: Sequence[Path] = (), reader: FolderReader | None = None
) -> InFolder | OnHub:
    """Find a model by its name. The first match counts: a path, the demo model, a short name that
    quire ships, the full name of a servable model in ``folders``, an id on the hub, the last part
    of the name of a model in ``folders`` or the hub's cache. Raises ModelNotFoundError."""
    path = Path(name).expanduser()
    if path.is_dir():
        if has_gguf_alone(path):
            raise ModelNotFoundError(f"{name}: {GGUF}")
        return InFolder(path.resolve().name, path.resolve())
    if name in (DEMO, DEMO_ID):
        return InFolder(DEMO_ID, shipped(DEMO_MODEL).resolve())
    base, revision = split_revision(name)
    if not path.is_file():
        base = aliases().get(base, base)
        own = local_models(folders, hub=False, reader=reader) if revision is None else ()
        for model in own:
            if model.name == base and model.problem is None:
                return _place(model)
        if is_hub_id(base):
            return OnHub(base, revision)
        if model_here := _by_last_part(name, folders, reader):
            return _place(model_here)
    raise ModelNotFoundError(f"{name}: {why_not(name, path, aliases())}")


def _by_last_part(
    name: str, folders: Sequence[Path], reader: FolderReader | None
) -> LocalModel | None:
    """Return the local model whose name without ``org/`` is ``name``. Raises ModelNotFoundError."""
    matches = [
        model
        for model in local_models(folders, reader=reader)
        if model.name.rpartition("/")[2].lower() == name.lower()
    ]
    if len(matches) > 1:
        names = " or ".join(model.name for model in matches)
        raise ModelNotFoundError(f"{name}: there are several on this disk: name {names}")
    return matches[0] if matches else None


def _place(model: LocalModel) -> InFolder | OnHub:
    if model.revision is None:
        return InFolder(model.name, model.folder)
    return OnHub(model.name, None)
