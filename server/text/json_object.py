"""JSON that others wrote."""

import json
from typing import Any


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text is; None where it is none.

    Line breaks within strings, which models write, are let pass; halves of characters, which no
    text can have, are not.
    """
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
