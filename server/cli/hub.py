"""Find a model's files: a local folder, or a repository of the Hugging Face hub.

Of a repository the small files are fetched first, and its weights when they are asked for: between
the two whoever serves sees whether he can. Both are of one commit.
"""

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars
from pydantic import ValidationError
from tqdm import tqdm

from server.cli.shipped import DEMO_MODEL, shipped
from server.protocol.common import OpenAISamplingFields

# A small model that comes along, and is called so unless there is a folder of that name.
DEMO, DEMO_ID = "demo", "quire-demo"
# What begins otherwise, or goes up, is a path.
HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\w[\w.-]*/[\w.-]*\w", re.ASCII)
# "qwen3:4b", with or without a person before it.
OLLAMA_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+:[\w.-]+")
# What repositories have, and are not called.
FILES = (".gguf", ".safetensors")
SMALL_FILES = ["*.json", "*.jinja", "*.txt"]
WEIGHTS = "model*.safetensors"
EXAMPLES = "Qwen/Qwen3-4B or mlx-community/Qwen3-4B-4bit"
GGUF = (
    "this is GGUF, and quire reads safetensors, in the format of Hugging Face or MLX: take the "
    f"model's own repository, or one in MLX's format, such as {EXAMPLES}"
)
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ModelNotFoundError(ValueError):
    """No such folder, and no such repository; one sentence."""


class SamplingDefaultsError(ValueError):
    """Recommended parameters that no request may have; one sentence that names file and field."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder, which may lack weights that its repository has."""

    name: str
    """The name that was asked for."""
    folder: Path
    missing: tuple[tuple[str, int], ...] = ()
    """Files of weights that are not there yet, and their bytes."""
    weights_bytes: int = 0
    """Bytes of all files of weights, where some are missing."""

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be fetched."""
        return sum(size for _, size in self.missing)

    def fetch_weights(self) -> None:
        """Fetch what is missing, of the commit that the folder is of, with one bar of progress.
        Raises ModelNotFoundError."""
        bar = tqdm(
            total=self.missing_bytes,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            desc="downloading",
            disable=None,
            leave=False,
        )
        with bar:
            for file, _ in self.missing:
                try:
                    hf_hub_download(
                        self.name,
                        file,
                        revision=self.folder.name,
                        tqdm_class=_part_of(bar),
                    )
                except Exception as error:
                    raise _not_given(self.name, error) from error


def find_model(name: str, *, download: bool = True) -> FoundModel:
    """Find a model's folder. Of a hub id it has all files but weights, which are fetched later
    unless they are cached.

    download: whether anything may be fetched; otherwise only what is cached is found, complete or
    not. Raises ModelNotFoundError.
    """
    path = Path(name).expanduser()
    if name == DEMO and not path.exists():
        path = shipped(DEMO_MODEL)
    if path.is_dir():
        if any(path.glob("*.gguf")) and not any(path.glob("*.safetensors")):
            raise ModelNotFoundError(f"{name}: {GGUF}")
        return FoundModel(name, path.resolve())
    if path.is_file() or not is_hub_id(name):
        raise ModelNotFoundError(f"{name}: {_why_not(name, path)}")
    try:
        with disable_progress_bars():
            folder = Path(
                snapshot_download(name, allow_patterns=SMALL_FILES, local_files_only=not download)
            )
    except Exception as error:
        if download:
            raise _not_given(name, error) from error
        raise ModelNotFoundError(
            f"{name}: there is no such folder, and it is not in the hub's cache: "
            f"{_first_line(error)}"
        ) from error
    return _with_missing(name, folder) if download else FoundModel(name, folder)


def is_hub_id(name: str) -> bool:
    """Return whether the hub may have a repository of that name."""
    return HUB_ID.fullmatch(name) is not None and not name.lower().endswith(FILES)


def _why_not(name: str, path: Path) -> str:
    """Say why a name is neither a folder nor a hub id, and what to write instead."""
    if path.suffix.lower() == ".gguf":
        return GGUF if path.is_file() else f"there is no such file; and {GGUF}"
    if path.is_file():
        return f"this is a file: name the folder that it lies in, {path.resolve().parent}"
    if OLLAMA_NAME.fullmatch(name):
        return (
            "this is how Ollama names models: name a folder, or an id of the Hugging Face hub, "
            f"such as {EXAMPLES}"
        )
    return f"there is no such folder, and it is not a hub id, such as {EXAMPLES}"


def _with_missing(name: str, folder: Path) -> FoundModel:
    """Add what the repository has besides, as it was listed when the small files were fetched."""
    try:
        listed = get_cached_repo_tree(name, revision=folder.name)
    except CachedRepoTreeNotFoundError:
        return FoundModel(name, folder)  # the hub cannot be asked: the cache is all there is
    weights = {
        file.path: file.size
        for file in listed
        if "/" not in file.path and fnmatchcase(file.path, WEIGHTS)
    }
    if not weights:
        has_gguf = any(file.path.endswith(".gguf") for file in listed)
        reason = GGUF if has_gguf else f"the repository has no {WEIGHTS} file"
        raise ModelNotFoundError(f"{name}: {reason}")
    missing = {file: size for file, size in weights.items() if not (folder / file).exists()}
    return FoundModel(name, folder, tuple(sorted(missing.items())), sum(weights.values()))


def _part_of(whole: "tqdm[Any]") -> Any:
    """Make the class of the progress bar that the hub's client makes for each file: all of them
    advance the whole bar."""

    class Part:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            whole.update(initial)

        def __enter__(self) -> "Part":
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def update(self, count: float | None = 1) -> None:
            whole.update(count)

        def close(self) -> None:
            """Close only this part: the whole goes on."""

        # What came over the wire, which may be less than what it makes, and rates of one file.
        update_transfer = set_postfix_str = set_transfer_postfix_str = lambda *_, **__: None

    return Part


def _not_given(name: str, error: Exception) -> ModelNotFoundError:
    """No network, no such repository, no permission, no room: many libraries' errors."""
    return ModelNotFoundError(
        f"{name}: there is no such folder, and the hub did not give it: {_first_line(error)}"
    )


def model_names(name: str, folder: Path, alias: str | None) -> tuple[str, ...]:
    """Return what clients may call the model: its alias, the name it was served by, its folder's
    name and path. The first one is its id."""
    own = name if is_hub_id(name) and not Path(name).exists() else folder.name
    if name == DEMO and folder == shipped(DEMO_MODEL).resolve():
        own = DEMO_ID
    names = ([alias] if alias else []) + [own, folder.name, name, str(folder)]
    return tuple(dict.fromkeys(names))


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return what generation_config.json recommends; greedy where it turns sampling off.

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
        OpenAISamplingFields.model_validate(found)
    except ValidationError as error:
        problem = error.errors()[0]
        raise SamplingDefaultsError(f"{file}: {problem['loc'][0]}: {problem['msg']}") from error
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
