"""Model folders that take for ever, or all memory, from a reader without limits."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models import TINY

Spoil = Callable[[Path], None]
MIB = 1 << 20


def _edited(name: str, edit: Callable[[Any], object]) -> Spoil:
    """Edit a file of JSON."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        edit(values)
        (folder / name).write_text(json.dumps(values))

    return change


def _config(**changes: Any) -> Spoil:
    return _edited("config.json", lambda values: values.update(changes))


def _token_ids(*ids: int) -> Spoil:
    """Add tokens of such ids."""
    more = {f"token {number}": number for number in ids}
    return _edited("tokenizer.json", lambda values: values["model"]["vocab"].update(more))


def _added_tokens(count: int) -> Spoil:
    def edit(values: Any) -> None:
        kind, first = values["added_tokens"][0], TINY.vocab_size
        more = [kind | {"id": first + i, "content": f"<|{i}|>"} for i in range(count)]
        values["added_tokens"] += more

    return _edited("tokenizer.json", edit)


def _no_tokens(values: Any) -> None:
    values["added_tokens"], values["model"]["vocab"] = [], {}
    values["model"]["merges"] = []


def _tensors(count: int) -> Spoil:
    """Write a header of so many tensors."""

    def change(folder: Path) -> None:
        entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        header = json.dumps({f"tensor {number}": entry for number in range(count)}).encode()
        file = folder / "model.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header)

    return change


def _instead(name: str, make: Callable[[Path], object]) -> Spoil:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def _large(size_bytes: int) -> Callable[[Path], object]:
    """Write a file of zeros that takes no room."""

    def make(file: Path) -> None:
        file.touch()
        os.truncate(file, size_bytes)

    return make


def _zeros(file: Path) -> None:
    file.symlink_to("/dev/zero")


def _brackets(file: Path) -> None:
    file.write_text("[" * 200_000)


HOSTILE: dict[str, Spoil] = {
    "a token of id 2**31": _token_ids(2**31),
    "tokens of ids with gaps": _token_ids(*(2**30 + 999_983 * n for n in range(1000))),
    "100,000 added tokens": _added_tokens(100_000),
    "10**6 tokens that end": _edited(
        "generation_config.json", lambda values: values.update(eos_token_id=[7] * 10**6)
    ),
    "300,000 packed layers": _config(
        quantization={"bits": 4, "group_size": 32}
        | {f"layer {n}": {"bits": 4, "group_size": 32} for n in range(300_000)}
    ),
    "10**9 layers": _config(num_hidden_layers=10**9),
    "300,000 tensors": _tensors(300_000),
    "a pipe as config.json": _instead("config.json", os.mkfifo),
    "a pipe as the weights": _instead("model.safetensors", os.mkfifo),
    "a pipe as the tokenizer": _instead("tokenizer.json", os.mkfifo),
    "a pipe as the template": _instead("chat_template.jinja", os.mkfifo),
    "zeros as config.json": _instead("config.json", _zeros),
    "zeros as the index": _instead("model.safetensors.index.json", _zeros),
    "zeros as the tokenizer's settings": _instead("tokenizer_config.json", _zeros),
    "a config.json of 200 MB": _instead("config.json", _large(200 * MIB)),
    "a tokenizer of 200 GB": _instead("tokenizer.json", _large(200_000 * MIB)),
    "a tokenizer without tokens": _edited("tokenizer.json", _no_tokens),
    "brackets as config.json": _instead("config.json", _brackets),
    "brackets as the index": _instead("model.safetensors.index.json", _brackets),
    "brackets as recommendations": _instead("generation_config.json", _brackets),
}


# Of the others nothing is opened, so that it is the same who reads them.
READ_ELSEWHERE = frozenset({"a token of id 2**31", "10**9 layers", "300,000 tensors"})


def spoil(model: Path, folder: Path, kind: str) -> Path:
    """Copy a model's folder, and make it hostile."""
    shutil.copytree(model, folder)
    HOSTILE[kind](folder)
    return folder
