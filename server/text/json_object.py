"""Parse JSON that clients or models wrote."""

import json
import re
from typing import Any
from urllib.parse import unquote

# Maximum number of values in a text. Parsing more values would delay other requests too long.
MAX_VALUES = 32_768
INDEX = re.compile(r"0|[1-9][0-9]{0,5}")


def outside_texts(piece: bytes, in_text: bool = False) -> tuple[bytes, bool]:
    """Return a piece of JSON without its strings, and whether the piece ends within a string. Each
    remaining comma or opening bracket begins a value. The piece must not end within an escape."""
    parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    # The parts are alternately outside and inside of strings.
    return b"".join(parts[in_text::2]), in_text ^ (len(parts) % 2 == 0)


def has_many_values(text: str) -> bool:
    """Return True if a JSON text has more than ``MAX_VALUES`` values."""
    if len(text) <= MAX_VALUES:
        return False
    outside, _ = outside_texts(text.encode(errors="replace"))
    return sum(map(outside.count, (b"[", b"{", b","))) > MAX_VALUES


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object, even with line breaks in strings. NaN and Infinity become strings.
    Return None for any other text, lone surrogates, huge numbers, or too many values."""
    if has_many_values(text):
        return None
    try:
        value = json.loads(text, strict=False, parse_constant=str)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def follow(reference: object, root: object) -> Any:
    """Resolve a ``$ref`` (RFC 6901) within a schema. Return None if the target does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and INDEX.fullmatch(name):
            root = root[int(name)] if int(name) < len(root) else None
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root
