"""What ``quire models`` prints."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvcache.memory_budget import gib
from server.catalogue.folder_reader import FolderReader
from server.catalogue.local_models import LocalModel, local_models
from server.catalogue.names import printable
from server.cli.model_files import EMBEDS
from server.cli.models.fit import Fit, Machine
from server.cli.settings import read_settings

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
    return _table(found) if found else NOTHING


def as_values(model: LocalModel, fit: Fit) -> dict[str, Any]:
    """Return a model and how it would be served as JSON has them."""
    values = asdict(replace(model, checkpoint=None)) | {"folder": str(model.folder)}
    for name in ("problem", "digest", "checkpoint"):  # the first one is the reason
        del values[name]
    return values | {"served": fit.reason is None} | asdict(fit)


def _table(found: Sequence[tuple[LocalModel, Fit]]) -> str:
    rows = [HEAD, *(_row(model, fit) for model, fit in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    reasons = [f"{printable(model.name)}: {fit.reason}" for model, fit in found if fit.reason]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _row(model: LocalModel, fit: Fit) -> tuple[str, ...]:
    context = fit.context or model.max_position_embeddings
    served = "no: see below" if fit.reason else "embeddings" if model.embeds else "yes"
    return (
        printable(model.name),
        model.family or "-",
        gib(model.size_bytes),
        model.quantization or "-",
        str(context or "-"),
        served,
    )
