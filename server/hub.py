"""Where a model's files are: a local folder, or a repository of the Hugging Face hub."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from pydantic import ValidationError

from server.protocol.common import SamplingFields

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WANTED_FILES = ["*.json", "model*.safetensors", "*.jinja", "*.txt"]
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ModelNotFoundError(ValueError):
    """No such folder, and no such repository; one sentence."""


class SamplingDefaultsError(ValueError):
    """Recommendations that no request could make; one sentence that names file and field."""


def find_model(name: str, *, download: bool = True) -> Path:
    """The folder of a model; downloads a hub id, with a progress bar, unless it is cached.

    download: whether that may be; otherwise only what is cached is found, complete or not. Raises
    ModelNotFoundError.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute() or not HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"{name}: there is no such folder, and it is not a hub id")
    try:
        return Path(
            snapshot_download(name, allow_patterns=WANTED_FILES, local_files_only=not download)
        )
    except Exception as error:
        # No network, no such repository, no permission, no room, no name: many libraries' errors.
        missing = "the hub did not give it" if download else "it is not in the hub's cache"
        raise ModelNotFoundError(
            f"{name}: there is no such folder, and {missing}: {_first_line(error)}"
        ) from error


def model_names(name: str, folder: Path, alias: str | None) -> tuple[str, ...]:
    """What clients may call the model: its alias, the name it was served by, its folder's name and
    path. The first one is its id."""
    own = name if HUB_ID.fullmatch(name) and not Path(name).exists() else folder.name
    names = ([alias] if alias else []) + [own, folder.name, name, str(folder)]
    return tuple(dict.fromkeys(names))


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """What generation_config.json recommends; greedy where it turns sampling off.

    Raises SamplingDefaultsError.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {key: config[key] for key in SAMPLING_DEFAULTS if config.get(key) is not None}
    try:
        SamplingFields.model_validate(found)
    except ValidationError as error:
        problem = error.errors()[0]
        raise SamplingDefaultsError(f"{file}: {problem['loc'][0]}: {problem['msg']}") from error
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
