"""Checks names of models, such as ids of the Hugging Face hub, and explains common mistakes."""

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path

# Names of the model that ships with quire. A local folder ``demo`` takes precedence.
DEMO, DEMO_ID = "demo", "quire-demo"
# Matches ``org/name``, without the texts "--" and "..".
HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\w[\w.-]*/[\w.-]*\w", re.ASCII)
# Matches the name of a branch or tag, or a commit's hash.
REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]*", re.ASCII)
# Matches a name in Ollama's form, such as "qwen3:4b" or "user/qwen3:4b".
OLLAMA_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+:[\w.-]+")
# Names with these suffixes are files in repositories, not repositories.
FILES = (".gguf", ".safetensors")
# The longest texts that are quoted from a model's files: for a problem, and for a single word.
MAX_PROBLEM_CHARS, MAX_WORD_CHARS = 1000, 100
# Ollama's clients add this tag to model names that have no tag.
LATEST = ":latest"
# Longer names are not compared with known names, because that would take long.
MAX_COMPARED_CHARS = 200
EXAMPLES = "Qwen/Qwen3-4B or mlx-community/Qwen3-4B-4bit"
GGUF = (
    "this is GGUF, and quire reads safetensors, in the format of Hugging Face or MLX: take the "
    f"model's own repository, or one in MLX's format, such as {EXAMPLES}"
)


class ModelNotFoundError(ValueError):
    """Raised if a name means no usable model. The text is one sentence for the user."""


def is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and not name.lower().endswith(FILES)


def split_revision(name: str) -> tuple[str, str | None]:
    """Split ``NAME@REVISION``. The revision is None for a text without ``@``."""
    base, at, revision = name.partition("@")
    return (base, revision) if at and REVISION.fullmatch(revision) else (name, None)


def plain_name(name: str) -> str:
    """Return a name in lower case, without slashes at its end or Ollama's tag ``:latest``."""
    return name.casefold().removesuffix(LATEST).rstrip("/")


def match(name: str, models: Collection[str]) -> str | None:
    """Return the one of ``models`` that ``name`` means, or None if none or several match. Names
    are compared as ``plain_name`` returns them, and organisations only if both names have one:
    ``name`` matches ``org/name``, but ``mine/name`` does not match ``yours/name``."""
    plain, plains = plain_name(name), {model: plain_name(model) for model in models}
    if name in models and plain:
        return name
    base = plain.rpartition("/")[2]
    alike = [model for model, other in plains.items() if plain and base == other.rpartition("/")[2]]
    same = [model for model in alike if plains[model] == plain]
    matches = same or [each for each in alike if "/" not in plain or "/" not in plains[each]]
    return matches[0] if len(matches) == 1 else None


def nearest(name: str, known: Iterable[str], separator: str = "/") -> str | None:
    """Return the known name that is most similar to ``name``, or None if none is. Compare with each
    whole name and with the part after the last separator. Prefer names that begin with ``name``."""
    if len(name) > MAX_COMPARED_CHARS:
        return None
    spellings: dict[str, str] = {}
    for one in sorted(known):
        for spelling in (one, one.rpartition(separator)[2]):
            spellings.setdefault(_plain(spelling), one)
    plain = _plain(name)
    longer = sorted((each for each in spellings if each.startswith(plain)), key=len)
    matches = longer or get_close_matches(plain, spellings, n=1)
    return spellings[matches[0]] if matches else None


def _plain(name: str) -> str:
    """Return a name in lower case with ``_`` in place of ``__``, ``.`` and ``-``."""
    return name.lower().replace("__", "_").replace(".", "_").replace("-", "_")


def why_not(name: str, path: Path, aliases: Iterable[str], near: str | None) -> str:
    """Explain to the user why no model is found by ``name``. ``path`` is ``name`` as a path.
    ``aliases`` are the short names that quire ships. ``near`` is a similar name of a model."""
    if path.suffix.lower() == ".gguf":
        return GGUF if path.is_file() else f"there is no such file; and {GGUF}"
    if path.is_file():
        return f"this is a file: name the folder that it lies in, {path.resolve().parent}"
    hint = f"; did you mean {near}?" if near else ""
    if OLLAMA_NAME.fullmatch(name):
        return (
            "this is how Ollama names models: name a folder, or an id of the Hugging Face hub, "
            f"such as {EXAMPLES}; of these names quire knows {', '.join(aliases)}{hint}"
        )
    return f"there is no such folder, and it is not a hub id, such as {EXAMPLES}{hint}"


def printable(text: str, max_chars: int | None = None) -> str:
    """Escape control characters and line breaks. Cut a text that exceeds ``max_chars``."""
    if max_chars is not None and len(text) > max_chars:
        text = f"{text[: max_chars - 1]}\N{HORIZONTAL ELLIPSIS}"
    if text.isprintable():
        return text
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)
