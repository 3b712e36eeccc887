"""Refuses requests without a valid key if keys are configured, except on a few open paths."""

import hashlib
import hmac
import re
import socket
from dataclasses import dataclass

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.chat.salts import request_key
from server.config import WILDCARDS, AccessSection, Config, SettingError
from server.http.errors import answer_with
from server.http.guards.hosts import AllowedHosts, AllowedOrigins, is_loopback, read_address
from server.metrics.requests import CountRefusal, Refusal
from server.protocol.wire_errors import ApiError

MIN_KEY_CHARS = 16
OPEN_PATHS = ("/", "/health", "/api/hello")
# Matches the paths of the page's files, whose names are plain and never "..".
OPEN_FILES = re.compile(r"/page(?:/[\w-][\w.-]*)+", re.ASCII)
SCRAPED_PATH = "/metrics"


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """SHA-256 digests of the configured keys."""

    api: tuple[bytes, ...]
    scrape: tuple[bytes, ...]

    @classmethod
    def of(cls, access: AccessSection) -> "Keys":
        """Hash the keys in the settings. Raises SettingError for a short or unprintable key."""
        numbered = enumerate(access.api_keys, start=1)
        api = [_digest_of(f"access.api_keys: key {number}", key) for number, key in numbered]
        scrape = () if access.scrape_key is None else (access.scrape_key,)
        return cls(tuple(api), tuple(_digest_of("access.scrape_key: it", key) for key in scrape))

    def has(self, key: str, path: str, method: str) -> bool:
        """Return True if the key may use the path. Compare all keys, each in constant time."""
        digest = _digest(key)
        is_api = [hmac.compare_digest(digest, known) for known in self.api]
        is_scrape = [hmac.compare_digest(digest, known) for known in self.scrape]
        return any(is_api) or (any(is_scrape) and (method, path) == ("GET", SCRAPED_PATH))


class KeyGuard:
    """Answers 401 to requests without a valid key, even for unknown paths. A few paths that reveal
    nothing need no key. If no key is configured, no path needs one."""

    def __init__(self, app: ASGIApp, keys: Keys, count: CountRefusal) -> None:
        self._app = app
        self._keys = keys
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = _plain_path(scope), scope["method"]
        is_open = path in OPEN_PATHS or OPEN_FILES.fullmatch(path) is not None
        key = request_key(Headers(scope=scope))
        if (
            not self._keys.api
            or (is_open and method in ("GET", "HEAD"))
            or self._keys.has(key, path, method)
        ):
            await self._app(scope, receive, send)
            return
        self._count(Refusal.KEY)
        await answer_with(_unauthorized(bool(key)), scope, receive, send)


def _plain_path(scope: Scope) -> str:
    """Return the path, or "" for a path with percent-escapes, which no open path has."""
    path: str = scope["path"]
    return path if path.encode() == scope.get("raw_path", path.encode()) else ""


def _digest_of(name: str, key: SecretStr) -> bytes:
    text = key.get_secret_value()
    if len(text) < MIN_KEY_CHARS:
        raise SettingError(
            f"setting {name} has {len(text)} characters; a key needs at least {MIN_KEY_CHARS}: "
            "`openssl rand -hex 16` makes one"
        )
    if not text.isascii() or not text.isprintable() or " " in text:
        raise SettingError(f"setting {name} has characters that no header can carry")
    return _digest(text)


def _digest(key: str) -> bytes:
    """Hash a key to a fixed length, so that a comparison does not reveal the key's length."""
    return hashlib.sha256(key.encode()).digest()


def _unauthorized(has_key: bool) -> ApiError:
    what = "This API key is not known here" if has_key else "An API key is needed"
    return ApiError(
        401,
        f"{what}: send one of those in setting access.api_keys as `Authorization: Bearer` or "
        "`x-api-key`.",
        code="invalid_api_key" if has_key else "missing_api_key",
        headers={"WWW-Authenticate": 'Bearer realm="quire"'},
    )


def check_access(settings: Config) -> None:
    """Raise SettingError for bad access settings, or if other machines need no key to connect."""
    keys = Keys.of(settings.access)
    AllowedHosts.of(settings)
    AllowedOrigins.of(settings.access)
    host = settings.server.host
    if not keys.api and not settings.access.insecure_no_auth and not only_this_machine(host):
        raise SettingError(
            f"setting server.host: {host!r} can be reached from other machines, and no key is set; "
            "set access.api_keys, or listen on 127.0.0.1 (--insecure-no-auth lets everybody in)"
        )


def only_this_machine(host: str) -> bool:
    """Return True if only this machine can connect to ``host``, the setting server.host."""
    if host in WILDCARDS:
        return False
    try:
        places = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [read_address(str(place[0])) for *_, place in places]
    return all(address is not None and is_loopback(address) for address in addresses)
