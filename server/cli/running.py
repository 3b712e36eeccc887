"""``quire ps`` and ``quire stop``: list a running server's models, and unload one of them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import httpx2

from kvcache.budget import gib
from server.cli.sentences import table
from server.config import WILDCARDS, Config, StartError

ASK_TIMEOUT_S = 5.0
# Long, because a model may finish running answers before it is unloaded.
STOP_TIMEOUT_S = 60.0
HEAD = ("MODEL", "MEMORY", "AT MOST", "CONTEXT", "STAYS")
UNKNOWN = "-"


class NotRunningError(StartError):
    """Raised if no server answers, or if the server refuses a request."""

    exit_code = 1


def loaded_models(settings: Config) -> str:
    """Return a table of the models that the server has loaded. Raises NotRunningError."""
    with _asking(settings) as client:
        models = _answer(client.get("/api/ps"))["models"]
    rows = [
        (
            one["name"],
            gib(one["size"]),
            # The server may be Ollama, which gives no limit.
            gib(one["size_max"]) if "size_max" in one else UNKNOWN,
            str(one["context_length"]),
            _stays(one["expires_at"]),
        )
        for one in models
    ]
    return "\n".join(table(HEAD, rows)) if rows else "no model is loaded"


def unload(settings: Config, model: str) -> str:
    """Have the server unload an idle model; return a sentence. Raises NotRunningError."""
    with _asking(settings) as client:
        _answer(client.post("/api/generate", json={"model": model, "keep_alive": 0}))
        loaded = _answer(client.get("/api/ps"))["models"]
    if model in [entry["name"] for entry in loaded]:
        raise NotRunningError(
            f"{model} stays loaded: it is in use, pinned, or served alone, by a process that ends "
            "with it (Ctrl-C)"
        )
    return f"{model} is unloaded"


def server_address(settings: Config) -> str:
    """Return the URL at which programs on this machine reach a server with these settings."""
    host, port = settings.server.host, settings.server.port
    name = "127.0.0.1" if host in WILDCARDS else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def client_of(settings: Config, url: str) -> httpx2.Client:
    key = settings.access.first_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = httpx2.Timeout(STOP_TIMEOUT_S, connect=ASK_TIMEOUT_S)
    # No proxy: the environment's proxies are meant for other machines.
    return httpx2.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)


@contextmanager
def _asking(settings: Config) -> Iterator[httpx2.Client]:
    """Yield an HTTP client of the server; turn connection errors into NotRunningError."""
    url = server_address(settings)
    try:
        with client_of(settings, url) as client:
            yield client
    except httpx2.HTTPError as error:
        raise NotRunningError(
            f"no server answers at {url}: {error or 'it took too long'}; start one with `quire "
            "serve`, or name its address with --host and --port"
        ) from error


def _answer(response: httpx2.Response) -> dict[str, Any]:
    """Return a response's JSON object. Raises NotRunningError if the response is not quire's."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict) and response.status_code == 200:
        return body
    error = body.get("error") if isinstance(body, dict) else None
    what = error if isinstance(error, str) else f"another program answers ({response.status_code})"
    raise NotRunningError(f"{response.request.url.copy_with(path='/')}: {what}")


def _stays(expires_at: str) -> str:
    """Return a text that says how long a model stays loaded without requests."""
    left_s = (datetime.fromisoformat(expires_at) - datetime.now(UTC)).total_seconds()
    minutes = math.ceil(left_s / 60)
    if minutes > 60 * 24 * 365:
        return "for ever"
    return f"{minutes} min" if left_s > 0 else "until its answers end"
