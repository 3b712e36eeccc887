"""Parse JSON that clients or models wrote."""

import json
from typing import Any

# Numbers, texts, lists and objects. Parsing more would stop other requests for too long.
MAX_VALUES = 32_768


def outside_texts(piece: bytes, in_text: bool = False) -> tuple[bytes, bool]:
    """Return JSON without its strings, and whether it ends within one. Each remaining comma or
    opening bracket begins a value. piece: must not end within an escape. in_text: whether it begins
    within a string."""
    parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    # Every other part is outside of strings.
    return b"".join(parts[in_text::2]), in_text ^ (len(parts) % 2 == 0)


def has_many_values(text: str) -> bool:
    """Return whether JSON has more than ``MAX_VALUES``, the largest number that is parsed in one
    go."""
    if len(text) <= MAX_VALUES:
        return False
    outside, _ = outside_texts(text.encode(errors="replace"))
    return sum(map(outside.count, (b"[", b"{", b","))) > MAX_VALUES


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a text as an object; None where it is none. Line breaks within strings, which models
    write, are accepted, and NaN and Infinity become strings. Half surrogates, numbers beyond float
    and more than ``MAX_VALUES`` values are refused."""
    if has_many_values(text):
        return None
    try:
        value = json.loads(text, strict=False, parse_constant=str)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def follow(reference: object, root: object) -> Any:
    """Resolve a ``$ref`` within a schema; None where it points at nothing. RFC 6901."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root
