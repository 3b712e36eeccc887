"""What ``quire show`` prints of a model on this disk."""

import json
from datetime import datetime
from pathlib import Path

from kvcache.memory_budget import gib
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub_cache import folders_in, snapshot_of
from server.catalogue.local_models import LocalModel, folder_model, hub_model
from server.catalogue.lookup import InFolder, look_up
from server.catalogue.names import printable
from server.cli.model_files import EMBEDS, ModelError, model_errors
from server.cli.models.fit import Fit, Machine
from server.cli.models.table import as_values
from server.cli.settings import read_settings

BILLION, MILLION = 1e9, 1e6


def show_model(name: str, file: Path | None, *, as_json: bool) -> str:
    """Write all that is known of a model. Raises StartError."""
    settings = read_settings(file, {})
    with model_errors(), FolderReader(EMBEDS[settings.engine.task]) as reader:
        place = look_up(name, settings.models.folders, reader)
        if isinstance(place, InFolder):
            model: LocalModel | None = folder_model(place.name, place.folder, reader)
        else:
            pinned = snapshot_of(place.repository, place.revision) if place.revision else None
            here = pinned is not None or place.revision is None
            model = hub_model(place.repository, reader, pinned) if here else None
    if model is None:
        raise ModelError(
            f"{name}: it is not on this disk: `quire pull {name}` fetches it, and `quire plan "
            f"{name}` says what it would need"
        )
    fit = Machine(settings).fit(model)
    files = {str(path.relative_to(model.folder)): size for path, size in _files(model.folder)}
    others = _other_commits(model)
    if as_json:
        values = as_values(model, fit)
        return json.dumps(values | {"files": files, "other_revisions": others}, indent=1)
    return "\n".join(_lines(model, fit, files, others))


def described(model: LocalModel) -> str:
    unit, name = (BILLION, "billion") if model.parameters >= BILLION else (MILLION, "million")
    kind = "makes vectors" if model.embeds else "generates text"
    numbers = f"{model.parameters / unit:.2f} {name} parameters" if model.parameters else ""
    parts = (model.family, numbers, model.quantization, kind if model.parameters else "")
    return ", ".join(part for part in parts if part)


def _files(folder: Path) -> list[tuple[Path, int]]:
    """Return all files of a model, and their bytes."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path, path.stat().st_size) for path in found]


def _other_commits(model: LocalModel) -> list[str]:
    """Return the commits of the same repository that something is here of."""
    if model.revision is None:
        return []
    return [path.name for path in folders_in(model.folder.parent) if path != model.folder]


def _lines(model: LocalModel, fit: Fit, files: dict[str, int], others: list[str]) -> list[str]:
    when = datetime.fromtimestamp(model.modified).astimezone()
    served = fit.reason
    if served is None:
        served = (
            f"yes, {fit.context} tokens of context; a token of K and V takes "
            f"{gib(fit.kv_bytes_per_token or 0)}"
        )
    rows = {
        "model": described(model),
        "context": f"{model.max_position_embeddings} tokens"
        if model.max_position_embeddings
        else "-",
        "weights": f"{gib(model.size_bytes)}, of {when:%Y-%m-%d %H:%M}",
        "folder": str(model.folder),
        "commit": model.revision or "- (the folder is not the hub's)",
        "others": ", ".join(others),
        "served here": served,
    }
    width = max(map(len, rows))
    lines = [f"  {key.ljust(width)}  {printable(value)}" for key, value in rows.items() if value]
    sizes = [f"  {printable(name)}  {gib(size)}" for name, size in files.items()]
    return [printable(model.name), *lines, "files", *sizes]
