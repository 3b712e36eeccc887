"""JSON that others wrote."""

import json
from typing import Any

# Numbers, texts, lists and objects; a reader holds up everybody for as long as it reads.
MAX_VALUES = 32_768


def has_many_values(text: str) -> bool:
    """Whether JSON has more than ``MAX_VALUES``: each but the first has a comma before it, or is
    the first one of its list or object."""
    if len(text) <= MAX_VALUES:
        return False
    parts = text.replace("\\\\", "").replace('\\"', "").split('"')
    outside = "".join(parts[::2])
    return sum(map(outside.count, "[{,")) > MAX_VALUES


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text is; None where it is none.

    Line breaks within strings, which models write, are let pass; halves of characters, which no
    text can have, are not; and nothing of ``MAX_VALUES`` or more.
    """
    if has_many_values(text):
        return None
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
