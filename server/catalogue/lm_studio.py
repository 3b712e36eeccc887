"""Finds the models that LM Studio has on this disk. quire only reads them.

LM Studio keeps models as ``publisher/name`` in the folder ``models`` of its home folder. The home
folder is ~/.lmstudio, in older versions ~/.cache/lm-studio, or any folder that the file
~/.lmstudio-home-pointer names (lmstudio-ai/lmstudio.js, findLMStudioHome). If the user has chosen
another folder of models, LM Studio's settings.json names it in the field ``downloadsFolder``."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from engine.models.safetensors_headers import CheckpointError, read_json


def lm_studio_folders() -> tuple[Path, ...]:
    """Return LM Studio's existing folders of models. In each home, the user's choice is first."""
    folders = [folder for home in _homes() for folder in (*_chosen_folder(home), home / "models")]
    return tuple(dict.fromkeys(folder.resolve() for folder in folders if os.path.isdir(folder)))


def is_below(folder: Path, folders: Iterable[Path]) -> bool:
    """Return True if a folder lies in one of ``folders``, such as LM Studio's."""
    return any(map(folder.is_relative_to, folders))


def _homes() -> Iterator[Path]:
    """Yield LM Studio's possible homes: only LMSTUDIO_HOME if it is set, none if it is empty."""
    if (chosen := os.environ.get("LMSTUDIO_HOME")) is not None:
        if chosen:
            yield Path(chosen).absolute()
        return
    with suppress(RuntimeError):  # the user has no home folder
        home = Path.home()
        with suppress(OSError, ValueError):
            if pointer := (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip():
                yield home / pointer
        yield from (home / ".lmstudio", home / ".cache/lm-studio")


def _chosen_folder(home: Path) -> Iterator[Path]:
    """Yield the folder of models that LM Studio's settings name, if they name one."""
    with suppress(CheckpointError, RuntimeError):  # RuntimeError: for the home of an unknown user
        folder = read_json(home / "settings.json").get("downloadsFolder")
        if isinstance(folder, str) and folder:
            yield home / Path(folder).expanduser()
