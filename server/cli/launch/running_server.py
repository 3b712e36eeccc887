"""Ask a running server what it serves."""

import json
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from server.config import StartError
from server.protocol.answers import advised_answer_tokens

ASK_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 4 * 1024**2


class LaunchError(StartError):
    """A tool cannot be launched."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What a tool has to know. url: without /v1. context: tokens of a prompt and its answer."""

    url: str
    key: str
    model: str
    context: int

    @property
    def answer_tokens(self) -> int:
        """How long an answer a tool should ask for."""
        return advised_answer_tokens(self.context)


def ask_server(url: str, key: str, model: str | None) -> RunningServer:
    """Return what the server at an address serves. model: one of its models; None is the first that
    is loaded, or else the first. Raises LaunchError."""
    url = url.rstrip("/").removesuffix("/v1")
    models = {str(entry["id"]): entry for entry in _models(url, key)}
    if not models:
        raise LaunchError(f"{url} serves no model")
    loaded = [name for name, entry in models.items() if entry.get("loaded", True)]
    name = [*loaded, *models][0] if model is None else model
    if name not in models:
        raise LaunchError(f"{url} does not serve {name!r}; it serves {', '.join(models)}")
    context = models[name].get("max_model_len")
    if not isinstance(context, int):
        raise LaunchError(
            f"{url} does not tell how long a context of {name!r} may be: ask that model something, "
            "so that it is loaded, and try again"
        )
    return RunningServer(url, key, name, context)


def _models(url: str, key: str) -> list[dict[str, Any]]:
    """Return the entries of GET /v1/models. Raises LaunchError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LaunchError(f"{url}: an address is written http://127.0.0.1:8000")
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        connection = kind(parts.hostname, parts.port, timeout=ASK_TIMEOUT_S)
        try:
            connection.request(
                "GET", f"{parts.path}/v1/models", headers={"Authorization": f"Bearer {key}"}
            )
            with connection.getresponse() as answer:
                status, body = answer.status, answer.read(MAX_ANSWER_BYTES)
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:
        raise LaunchError(
            f"nothing answers at {url} ({error}): start `quire serve MODEL`, or name the address "
            "of another server with --url"
        ) from error
    if status in (401, 403):
        raise LaunchError(f"{url} wants another key ({status}): --key, or access.api_keys")
    try:
        entries: list[dict[str, Any]] = json.loads(body)["data"]
        return [dict(entry) for entry in entries if "id" in entry]
    except (ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"{url} answers GET /v1/models with {status}, and no list") from error
