"""Resolves a model's name to a folder or to a repository on the hub."""

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

from server.catalogue.folder_reader import FolderReader
from server.catalogue.foreign_files import foreign_weights
from server.catalogue.local_models import Place, model_here, places_here
from server.catalogue.names import (
    DEMO,
    DEMO_ID,
    ModelNotFoundError,
    is_hub_id,
    nearest,
    split_revision,
    why_not,
)
from server.shipped import ALIASES_FILE, DEMO_MODEL, shipped


@cache
def aliases() -> dict[str, str]:
    """Return ``{short name: repository}`` of the short names that quire ships."""
    text = shipped(ALIASES_FILE).read_text(encoding="utf-8")
    names: dict[str, str] = tomllib.loads(text)["aliases"]
    return names


def look_up(
    name: str,
    folders: Sequence[Path] = (),
    reader: FolderReader | None = None,
    *,
    on_disk: bool = False,
) -> Place:
    """Resolve a name. The meanings are tried in this order: a path; the demo model; a short name of
    quire's; the full name of a model on this disk; an id on the hub; the last part of such a full
    name. Only paths and revisions are case-sensitive. on_disk: whether a model that is on this disk
    but cannot be served comes before an id on the hub. Raises ModelNotFoundError."""
    path = Path(name).expanduser()
    if path.is_dir():
        if problem := foreign_weights(path):
            raise ModelNotFoundError(f"{name}: {problem}")
        return Place(path.resolve().name, path.resolve())
    if name.casefold() in (DEMO, DEMO_ID):
        return Place(DEMO_ID, shipped(DEMO_MODEL).resolve())
    base, revision = split_revision(name)
    if not path.is_file():
        base = aliases().get(base.casefold(), base)
        here = [place for place in places_here(folders) if not (revision and place.folder)]
        exact = [place for place in here if place.name == base]
        places = exact or [place for place in here if place.name.casefold() == base.casefold()]
        if not places and not is_hub_id(base):
            places = _by_last_part(base, here)
        place = _best(places, reader)
        if place is None and is_hub_id(base) and not (on_disk and places):
            place = Place(base)
        if place or places:
            return (place or places[0])._replace(revision=revision)
    near = nearest(base, known_names(folders))
    raise ModelNotFoundError(f"{name}: {why_not(name, path, aliases(), near)}")


def known_names(folders: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the names of models on this disk, and quire's short names with their repositories."""
    yield from itertools.chain(*aliases().items())
    yield from (place.name for place in places_here(folders))


def _by_last_part(name: str, places: Iterable[Place]) -> list[Place]:
    """Return all places of the model that is called ``name`` after the last slash. Raises
    ModelNotFoundError if there are several such models."""
    matches = [one for one in places if one.name.rpartition("/")[2].casefold() == name.casefold()]
    if len(names := {own.casefold(): own for own, *_ in matches}) > 1:
        known = " or ".join(names.values())
        raise ModelNotFoundError(f"{name}: there are several on this disk: name {known}")
    return matches


def _best(places: Sequence[Place], reader: FolderReader | None) -> Place | None:
    """Return the first place with a servable model. If there is none, return the hub's cache, where
    `quire pull` may complete the model. If that is no place of the model, return None."""
    cached = next((place for place in places if place.folder is None), None)
    if places and places != [cached]:
        with FolderReader() if reader is None else nullcontext(reader) as read:
            for place in places:
                model = model_here(place, read)
                if model is not None and model.problem is None:
                    return place
    return cached
