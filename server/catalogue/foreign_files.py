"""Recognizes files in a model's folder that quire cannot read: GGUF without safetensors, adapters
without their model, and pointers of Git LFS in place of files."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.models.safetensors_headers import INDEX_FILE, CheckpointError, read_json
from server.catalogue.names import GGUF, MAX_WORD_CHARS, printable

CONFIG_FILE = "config.json"
# In the hub's cache, each repository has a folder of this name, with one subfolder for each commit.
SNAPSHOTS = "snapshots"
# Describes adapters in PEFT's format (huggingface.co/docs/peft, "Checkpoint format") and in MLX's
# (mlx-lm, LORA.md). The first of BASE_FIELDS that is set names the model.
ADAPTER_FILE = "adapter_config.json"
BASE_FIELDS = ("base_model_name_or_path", "model")
# Files that Git LFS has not fetched begin like this (github.com/git-lfs/git-lfs, docs/spec.md).
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_POINTER_BYTES = 1024
READ_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".safetensors"})


def foreign_weights(folder: Path, listed: Iterable[str] | None = None) -> str | None:
    """Return a sentence that tells why quire cannot read a model's weights, or None if no reason is
    found. listed: the names of the model's files, if weights are not in the folder yet. Raises
    CheckpointError for a malformed description of adapters."""
    names = {path.name for path in folder.glob("*")} if listed is None else {*listed}
    weights = [name for name in names if name.endswith(".safetensors")]
    if INDEX_FILE in names or any(name.startswith("model") for name in weights):
        return None
    has_adapters = any("adapter" in name for name in names - {ADAPTER_FILE})
    if ADAPTER_FILE in names and (has_adapters or CONFIG_FILE not in names):
        return _adapters(read_json(folder / ADAPTER_FILE))
    has_gguf = any(name.lower().endswith(".gguf") for name in names)
    return GGUF if has_gguf and not weights else None


def _adapters(config: dict[str, Any]) -> str:
    bases = [str(config[field]) for field in BASE_FIELDS if config.get(field)]
    base = printable(bases[0], MAX_WORD_CHARS) if bases else "some model"
    how = "PEFT's `merge_and_unload`" if "peft_type" in config else "`mlx_lm.fuse`"
    return f"these are adapters for {base}, and quire serves whole models: fuse the two with {how}"


def refuse_foreign_files(folder: Path) -> None:
    """Raise CheckpointError if the weights are foreign, or a file that quire reads is a pointer."""
    if problem := foreign_weights(folder):
        raise CheckpointError(f"{folder}: {problem}")
    refuse_pointers(folder)


def refuse_pointers(folder: Path) -> None:
    """Raise CheckpointError if a file that quire reads is a pointer of Git LFS."""
    how = f"fetch it with `git -C {shlex.quote(str(folder))} lfs pull`"
    if folder.parent.name == SNAPSHOTS:
        how = "remove the model from the hub's cache with `quire rm`, and pull it again"
    for file in sorted(folder.glob("*")):
        if file.suffix not in READ_SUFFIXES or not file.is_file():
            continue
        if file.stat().st_size <= MAX_POINTER_BYTES and file.read_bytes().startswith(LFS_POINTER):
            pointer = f"{file}: this is a pointer of Git LFS, and not the file itself"
            raise CheckpointError(f"{pointer}: {how}")
