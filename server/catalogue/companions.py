"""Finds the companion of a model: files with nothing but the head that drafts for the model.

mlx-lm leaves the head out when it converts a Qwen3.5, 3.6 or 3.8. mlx-vlm splits it off, and
mlx-community has the results (Blaizzy/mlx-vlm, speculative/drafters/qwen3_5_mtp)."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from engine.models.checkpoint import Checkpoint, read_checkpoint
from engine.models.config import ModelConfig
from engine.models.families import DRAFT_HEAD
from engine.models.safetensors_headers import CheckpointError
from server.catalogue.foreign_files import SNAPSHOTS, refuse_pointers
from server.catalogue.hub_cache import best_snapshot, folders_in, lacks_weights, snapshot_of

FAMILIES = ("qwen3_5", "qwen3_5_moe")
PUBLISHER = "mlx-community"
PACKINGS = ("4bit", "8bit", "bf16")
# Matches what a conversion adds to a model's name, such as "-4bit", "-MLX-8bit" or "-4bit-DWQ".
SUFFIX = re.compile(r"(?:-(?:mlx|optiq|dwq|\d+bit|bf16|mxfp[48]|nvfp4))*$", re.IGNORECASE)


class Heads(NamedTuple):
    """Where the head that drafts for a model may lie, besides the model's own folder."""

    drafts: bool = True
    """False if none is wanted."""
    named: str | None = None
    """A folder whose head takes the place of the model's own."""
    companion: str | None = None
    """A folder for a model that has no head of its own."""
    on_hub: bool = False
    """Whether a head that lies beside the model's weights is still to be fetched."""


OWN = Heads()


def read_with_head(folder: Path, embeds: bool | None, heads: Heads) -> Checkpoint:
    """Read a model and its head. A companion that does not fit is left out, with its problem.
    Raises CheckpointError."""
    named = Path(heads.named) if heads.named else None
    checkpoint = read_checkpoint(folder, embeds=embeds, drafts=heads.drafts, draft=named)
    if not (heads.drafts and heads.companion and lacks_head(checkpoint)):
        return checkpoint
    try:
        return read_checkpoint(folder, embeds=embeds, draft=Path(heads.companion))
    except CheckpointError as error:
        return replace(checkpoint, draft_problem=str(error))


def lacks_head(checkpoint: Checkpoint) -> bool:
    """Return whether a model has no head, and is of a kind that may have a companion."""
    if checkpoint.embeds or checkpoint.spec.draft is not None:
        return False
    return ModelConfig(checkpoint.path).values.get("model_type") in FAMILIES


def is_companion(folder: str) -> bool:
    refuse_pointers(Path(folder))
    return ModelConfig(Path(folder)).values.get("model_type") == DRAFT_HEAD


def companion_names(model: str) -> list[str]:
    """Return the names that a model's companion may have on the hub: first the one with the same
    bits, then the others, smallest first."""
    name = _last_part(model)
    base = SUFFIX.sub("", name)
    packings = sorted(PACKINGS, key=lambda packing: packing not in name[len(base) :].lower())
    return [f"{PUBLISHER}/{base}-MTP-{packing}" for packing in packings]


def companion_among(
    places: Iterable[tuple[str, Path | None, str | None]], model: str | Path
) -> str | None:
    """Return the folder of the best companion in ``places``, or beside the model's folder; None if
    there is none. Only names are compared. ``model`` is the model's name or folder."""
    known = [*places]
    if isinstance(model, Path):
        known = [(each.name, each, None) for each in folders_in(model.parent)] + known
        is_snapshot = model.parent.name == SNAPSHOTS
        model = model.parent.parent.name.rpartition("--")[2] if is_snapshot else model.name
    wanted = [_last_part(name).casefold() for name in companion_names(model)]
    alike = (place for name in wanted for place in known if _last_part(place[0]).casefold() == name)
    return next((str(folder) for each in alike if (folder := complete_folder(*each))), None)


def complete_folder(name: str, folder: Path | None, revision: str | None) -> Path | None:
    """Return a Place's folder, or None if the hub's cache lacks a part of the weights."""
    if folder is not None:
        return folder
    snapshot = snapshot_of(name, revision) if revision else best_snapshot(name)
    return snapshot if snapshot and not lacks_weights(name, snapshot) else None


def _last_part(name: str) -> str:
    return name.rpartition("/")[2]
