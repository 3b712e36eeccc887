"""What tells a checkpoint that makes vectors of texts from one that generates.

Such a checkpoint has the same config.json: model_type qwen3, architectures Qwen3ForCausalLM. It is
known by any of these:

* modules.json stands beside it, the list of modules that sentence-transformers runs one after the
  other (sbert.net, "Creating Custom Models"). They must be what is computed here: a Transformer,
  pooling of the last token, and a Normalize at most.
* Its weights are named without ``model.``: it is saved as the part of a model below the head, as
  Qwen's own are.
* The head is missing although the config does not tie it to the embeddings.

What was converted so that none is left must be named by the setting engine.task.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from engine.models.safetensors_headers import CheckpointError, read_json, read_json_list
from engine.models.tensors import EMBEDDING, HEAD

MODULES_FILE = "modules.json"
BARE_NAME = f"{EMBEDDING}.weight"
HEAD_NAME = f"{HEAD}.weight"
COMPUTED = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def is_embedding_checkpoint(path: Path, names: Collection[str], *, tied: bool) -> bool:
    """Return whether a folder makes vectors. names: of its tensors. tied: whether config.json ties
    the head to the embeddings. Raises CheckpointError where they are made in another way than
    here."""
    if (path / MODULES_FILE).is_file():
        check_modules(path)
        return True
    return BARE_NAME in names or not (tied or any(its.endswith(HEAD_NAME) for its in names))


def check_modules(path: Path) -> None:
    """Raise CheckpointError for modules that would make other vectors."""
    file = path / MODULES_FILE
    modules = read_json_list(file)
    kinds = [_kind(module) for module in modules]
    if kinds not in COMPUTED:
        raise CheckpointError(
            f"{file}: the modules are {', '.join(kinds) or 'none'}; quire serves Transformer, "
            "Pooling and Normalize"
        )
    settings = path / str(modules[1].get("path")) / "config.json"
    modes = _pooling_modes(read_json(settings))
    if modes != {"lasttoken"}:
        raise CheckpointError(
            f"{settings}: the pooling is {', '.join(sorted(modes)) or 'none'}; quire serves "
            "lasttoken"
        )


def _kind(module: Any) -> str:
    """Return the last part of the class that a module is of."""
    kind = module.get("type") if isinstance(module, dict) else None
    return str(kind).rpartition(".")[2]


def _pooling_modes(settings: dict[str, Any]) -> set[str]:
    """Return the pooling modes: one name in newer files, a flag for each in older ones."""
    named = settings.get("pooling_mode")
    if isinstance(named, str):
        return set(named.split("+"))
    flags = {name for name, value in settings.items() if value is True}
    return {name.removeprefix("pooling_mode_") for name in flags if "pooling_mode_" in name}
