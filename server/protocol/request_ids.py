"""The id of the request that is being answered: one, in its headers, its errors and its log."""

import re
import secrets
from collections.abc import Iterable

from structlog.contextvars import bind_contextvars, clear_contextvars, get_contextvars

HEADER = "x-request-id"
REQUEST_ID_BYTES = 12
CLIENTS_IDS = re.compile(r"[A-Za-z0-9_-]{1,64}")


def new_request_id() -> str:
    """Make an id that no other request has; nothing here remembers it."""
    return f"req_{secrets.token_hex(REQUEST_ID_BYTES)}"


def bind_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Name the request that begins now: as its client does, if it does so once and in plain
    letters; else anew. All that this request logs carries the name from now on."""
    given = [value.decode("latin-1") for name, value in headers if name.lower() == HEADER.encode()]
    taken = len(given) == 1 and CLIENTS_IDS.fullmatch(given[0])
    request_id = given[0] if taken else new_request_id()
    clear_contextvars()
    bind_contextvars(request_id=request_id)
    return request_id


def current_request_id() -> str:
    """Return the id of the request that is being answered; a new one where there is none."""
    bound = get_contextvars().get("request_id")
    return bound if isinstance(bound, str) else new_request_id()
