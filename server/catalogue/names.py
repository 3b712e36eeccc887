"""Check names of models: folders, ids of the Hugging Face hub, and mistakes."""

import re
from collections.abc import Iterable
from pathlib import Path

# The small model that comes with quire; a folder of that name comes first.
DEMO, DEMO_ID = "demo", "quire-demo"
# A name that begins otherwise, or has "..", is a path.
HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\w[\w.-]*/[\w.-]*\w", re.ASCII)
# A branch, a tag or a commit.
REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]*", re.ASCII)
# "qwen3:4b", with or without a person before it.
OLLAMA_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+:[\w.-]+")
# Suffixes of files in repositories, not of repositories.
FILES = (".gguf", ".safetensors")
# The longest problem, and the longest word of other people's files, that a line shows.
MAX_PROBLEM_CHARS, MAX_WORD_CHARS = 1000, 100
EXAMPLES = "Qwen/Qwen3-4B or mlx-community/Qwen3-4B-4bit"
GGUF = (
    "this is GGUF, and quire reads safetensors, in the format of Hugging Face or MLX: take the "
    f"model's own repository, or one in MLX's format, such as {EXAMPLES}"
)


class ModelNotFoundError(ValueError):
    """No such folder, and no such repository; one sentence."""


def is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not name.lower().endswith(FILES)


def split_revision(name: str) -> tuple[str, str | None]:
    """Return a name without its pin, and the branch, tag or commit that it is pinned to."""
    base, at, revision = name.partition("@")
    return (base, revision) if at and REVISION.fullmatch(revision) else (name, None)


def has_gguf_alone(folder: Path) -> bool:
    """Return whether a folder's weights are in GGUF alone, which is not read."""
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def why_not(name: str, path: Path, aliases: Iterable[str]) -> str:
    """Say why a name is not a model's, and how to write it. path: the name as a path. aliases: all
    short names."""
    if path.suffix.lower() == ".gguf":
        return GGUF if path.is_file() else f"there is no such file; and {GGUF}"
    if path.is_file():
        return f"this is a file: name the folder that it lies in, {path.resolve().parent}"
    if OLLAMA_NAME.fullmatch(name):
        return (
            "this is how Ollama names models: name a folder, or an id of the Hugging Face hub, "
            f"such as {EXAMPLES}; of these names quire knows {', '.join(aliases)}"
        )
    return f"there is no such folder, and it is not a hub id, such as {EXAMPLES}"


def printable(text: str, max_chars: int | None = None) -> str:
    """Return other people's text as it may stand in a line: characters that move a terminal's
    cursor or begin a line are escaped. max_chars: the text is cut behind them."""
    if max_chars is not None and len(text) > max_chars:
        text = f"{text[: max_chars - 1]}\N{HORIZONTAL ELLIPSIS}"
    if text.isprintable():
        return text
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)
