"""``quire models`` and ``quire show``: the facts of models on this disk."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.build import EnginePlan
from engine.models.checkpoint import Checkpoint
from kvcache.memory_budget import gib
from kvcache.substrates import SubstrateChoice
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub_cache import folders_in, snapshot_of
from server.catalogue.local_models import LocalModel, folder_model, hub_model, local_models
from server.catalogue.lookup import InFolder, look_up
from server.catalogue.names import printable
from server.cli.model_files import EMBEDS, ModelError, make_plan, model_errors
from server.cli.sentences import table
from server.cli.settings import read_settings
from server.config import Config, SettingError


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model would be served, or why it would not be."""

    context: int | None
    """Tokens of the longest sequence; None where it cannot be served."""
    kv_bytes_per_token: int | None
    reason: str | None
    """Why it cannot be served here, a sentence; None where it can."""


class Machine:
    """This machine, with the settings in force."""

    def __init__(self, settings: Config, budget_bytes: int | None = None) -> None:
        """budget_bytes: memory for a model in all; None: the machine's free memory."""
        self.settings = settings
        self.budget_bytes = budget_bytes
        # Made with the first model and used for all: trying a GPU takes long.
        self._choice: SubstrateChoice | None = None

    def plan(self, checkpoint: Checkpoint) -> EnginePlan:
        """Fit a model and its cache into the memory. Raises SettingError with the figure that does
        not fit."""
        plan = make_plan(self.settings, checkpoint, self.budget_bytes, self._choice)
        self._choice = plan.substrate
        return plan

    def fit(self, model: LocalModel) -> Fit:
        if model.checkpoint is None:
            return Fit(None, None, model.problem)
        try:
            memory = self.plan(model.checkpoint).memory
        except SettingError as error:
            return Fit(None, None, str(error))
        return Fit(memory.max_model_len, memory.layout.bytes_per_token, None)


HEAD = ("name", "family", "size", "packed", "context", "served here")
NOTHING = (
    "There are no models on this disk: `quire pull qwen3:0.6b` fetches a small one, and `quire "
    "serve demo` serves a tiny one that comes along."
)


def list_models(file: Path | None, say: Callable[[str], None], *, as_json: bool) -> str:
    """Write which models are on this disk, and which of them this machine can serve.

    say: for folders of the settings that are not there. Raises StartError.
    """
    settings = read_settings(file, {})
    for folder in settings.models.folders:
        if not folder.expanduser().is_dir():
            say(f"models.folders: {folder}: there is no such folder")
    machine = Machine(settings)
    with FolderReader(EMBEDS[settings.engine.task]) as reader:
        models = local_models(settings.models.folders, reader=reader)
    found = [(model, machine.fit(model)) for model in models]
    if as_json:
        return json.dumps({"models": [as_values(model, fit) for model, fit in found]}, indent=1)
    return "\n".join(_lines_of_table(found)) if found else NOTHING


def as_values(model: LocalModel, fit: Fit) -> dict[str, Any]:
    """Return a model and how it would be served as JSON has them."""
    values = asdict(replace(model, checkpoint=None)) | {"folder": str(model.folder)}
    for name in ("problem", "digest", "checkpoint"):  # the first one is the reason
        del values[name]
    return values | {"served": fit.reason is None} | asdict(fit)


def _lines_of_table(found: Sequence[tuple[LocalModel, Fit]]) -> list[str]:
    rows = [
        (
            printable(model.name),
            model.family or "-",
            gib(model.size_bytes),
            model.quantization or "-",
            str(fit.context or model.max_position_embeddings or "-"),
            "no: see below" if fit.reason else "embeddings" if model.embeds else "yes",
        )
        for model, fit in found
    ]
    reasons = [f"{printable(model.name)}: {fit.reason}" for model, fit in found if fit.reason]
    return [*table(HEAD, rows), *([""] if reasons else []), *reasons]


BILLION, MILLION = 1e9, 1e6


def show_model(name: str, file: Path | None, *, as_json: bool) -> str:
    """Write all facts of a model. Raises StartError."""
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
    """Return the other commits of the repository of which files are here."""
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
