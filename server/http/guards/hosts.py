"""Refuses requests with a foreign Host or Origin header.

This prevents DNS rebinding: a web page points its own name to our address, so that the browser
takes our answers for the page's. The Host header still has the page's name, and is refused."""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import WILDCARDS, AccessSection, Config, SettingError
from server.http.errors import adding, answer_with
from server.metrics.requests import CountRefusal, Refusal
from server.protocol.wire_errors import ApiError, invalid

AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_.-]+))(?::(?P<port>[0-9]{0,5}))?"
)
Address = IPv4Address | IPv6Address


class Authority(NamedTuple):
    """A host and a port that can be compared with others. The port may be empty."""

    host: str | Address
    """A name in lower case without a final dot, or an address."""
    port: str


def read_authority(text: str) -> Authority | None:
    """Parse a host and a port. Return None for any other text."""
    match = AUTHORITY.fullmatch(text.lower())
    if match is None:
        return None
    port = match["port"] or ""
    if match["v6"] is not None:
        address = read_address(match["v6"])
        # A text in brackets that has no ":" is an IPv4 address, which must not have brackets.
        return None if address is None or ":" not in match["v6"] else Authority(address, port)
    name = match["name"].removesuffix(".")
    return Authority(read_address(name) or name, port) if name.strip(".") else None


def read_address(text: str) -> Address | None:
    """Parse an IP address. An IPv4 address written as an IPv6 address becomes IPv4."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str | Address) -> bool:
    """Return True if a host always means this machine."""
    return host == "localhost" if isinstance(host, str) else host.is_loopback


ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@\s]*)")
SCHEMES_OF_PROGRAMS = frozenset({"app", "tauri", "file", "vscode-webview", "vscode-file"})
SCHEMES_OF_EXTENSIONS = frozenset({"chrome-extension", "moz-extension", "safari-web-extension"})
DEFAULT_PORTS = {"http": "80", "https": "443"}
METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED = (
    "X-Request-Id, Request-Id, Retry-After, X-Should-Retry, X-Images-Not-Shown, "
    "X-History-Left-Out, X-Quire-Not-Enforced"
)
PREFLIGHT_KEPT_S = 3600
MAX_ASKED_HEADERS_CHARS = 2048
# Matches a comma-separated list of header names: RFC 9110, section 5.6.2.
HEADER_NAMES = re.compile(
    r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*"
)


@dataclass(frozen=True, slots=True)
class AllowedOrigins:
    """Origins that may send requests: those of local pages and programs, and configured ones."""

    configured: frozenset[str]
    schemes: frozenset[str] = SCHEMES_OF_PROGRAMS
    """The URL schemes of allowed desktop programs and browser extensions."""

    @classmethod
    def of(cls, access: AccessSection) -> "AllowedOrigins":
        """Read the origins in the settings. Raises SettingError for any other text, like ``*``."""
        found: set[str] = set()
        for text in access.allowed_origins:
            origin = _normal(text.rstrip("/")) if text != "null" else None
            if origin is None:
                raise SettingError(
                    f"setting access.allowed_origins: {text!r} is no origin; write each page's as "
                    '"https://chat.example"'
                )
            found.add(origin)
        extensions = SCHEMES_OF_EXTENSIONS if access.allow_browser_extensions else frozenset()
        return cls(frozenset(found), SCHEMES_OF_PROGRAMS | extensions)

    def has(self, origin: str, host: str) -> bool:
        """Return True if pages of ``origin`` may send requests. ``host`` is the request's Host
        header. Pages of this host are this server's own, because HostGuard accepted the header."""
        parts = ORIGIN.fullmatch(origin.lower())
        if parts is None:
            return False
        scheme, rest = parts.groups()
        if scheme in self.schemes or _normal(origin) in self.configured:
            return True
        authority = read_authority(rest)
        if scheme not in DEFAULT_PORTS or authority is None:
            return False
        return (
            is_loopback(authority.host)
            or authority.host == "tauri.localhost"
            or authority == read_authority(host)
        )


def _normal(origin: str) -> str | None:
    """Return an origin as browsers write it, or None for a text that is no origin."""
    parts = ORIGIN.fullmatch(origin.lower())
    if parts is None:
        return None
    scheme, rest = parts.groups()
    if scheme not in DEFAULT_PORTS:
        return f"{scheme}://{rest}"
    if read_authority(rest) is None:
        return None
    return f"{scheme}://{rest.removesuffix(':' + DEFAULT_PORTS[scheme])}"


class OriginGuard:
    """Answers 403 to pages of foreign origins, and answers preflight requests of allowed pages."""

    def __init__(self, app: ASGIApp, allowed: AllowedOrigins, count: CountRefusal) -> None:
        self._app = app
        self._allowed = allowed
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origins = headers.getlist("origin")
        if not origins and not _embedded(scope["method"], headers):
            await self._app(scope, receive, send)
            return
        if len(origins) != 1 or not self._allowed.has(origins[0], headers["host"]):
            self._count(Refusal.ORIGIN)
            text = "Pages of this origin may not ask: setting access.allowed_origins adds origins."
            error = ApiError(403, text, type="permission_error", code="origin_not_allowed")
            await answer_with(error, scope, receive, send)
            return
        send_with_headers = adding(
            {
                "Access-Control-Allow-Origin": origins[0],
                "Access-Control-Expose-Headers": EXPOSED,
                "Vary": "Origin",
            },
            send,
        )
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)


def _embedded(method: str, headers: Headers) -> bool:
    """Return True if a foreign site's page embeds the path as an image, script or frame. Browsers
    then send no Origin header. Following a link does not count as embedding."""
    if headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
        return False
    followed = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
    return not (method in ("GET", "HEAD") and followed == ("navigate", "document"))


async def _preflight(headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a preflight request, which has no API key, with the list of allowed headers."""
    allowed_headers = {
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Max-Age": str(PREFLIGHT_KEPT_S),
    }
    requested = headers.get("access-control-request-headers", "").strip()
    if requested:
        if len(requested) > MAX_ASKED_HEADERS_CHARS or not HEADER_NAMES.fullmatch(requested):
            error = invalid("Access-Control-Request-Headers is no list of header names.")
            await answer_with(error, scope, receive, send)
            return
        allowed_headers["Access-Control-Allow-Headers"] = requested
    if headers.get("access-control-request-private-network") == "true":
        allowed_headers["Access-Control-Allow-Private-Network"] = "true"
    await Response(status_code=204, headers=allowed_headers)(scope, receive, send)


NOT_OURS = (
    "This server does not go by the name in the request's Host header; setting "
    "access.allowed_hosts adds names."
)
OWN_NAMES = ("localhost", "127.0.0.1", "[::1]", "host.docker.internal")
ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The names and addresses of this server. A Host header may have any port."""

    hosts: frozenset[str | Address]
    any_address: bool
    """True if the server listens on all addresses. A Host header may then be any IP address."""

    @classmethod
    def of(cls, settings: Config) -> "AllowedHosts":
        """Read the host names in the settings. Raises SettingError for an invalid name."""
        listened = settings.server.host
        names = [*OWN_NAMES, *settings.access.allowed_hosts]
        if listened not in WILDCARDS:
            names.append(f"[{listened}]" if ":" in listened else listened)
        hosts: set[str | Address] = set()
        for name in names:
            # In settings, an IPv6 address may lack the brackets that read_authority requires.
            found = read_address(name) or getattr(read_authority(name), "host", None)
            if found is None:
                raise SettingError(
                    f"setting access.allowed_hosts: {name!r} is no host name; write it as "
                    '"name.example", without scheme and wildcards'
                )
            hosts.add(found)
        return cls(frozenset(hosts), listened in WILDCARDS)

    def has(self, host: str) -> bool:
        authority = read_authority(host)
        if authority is None:
            return False
        return authority.host in self.hosts or (
            self.any_address and not isinstance(authority.host, str)
        )


class HostGuard:
    """Answers 400 unless a request has exactly one Host header, and 403 to a foreign host."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts, count: CountRefusal) -> None:
        self._app = app
        self._allowed = allowed
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _take_absolute_target(scope)
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and self._allowed.has(hosts[0].decode("latin-1")):
            await self._app(scope, receive, send)
            return
        self._count(Refusal.HOST)
        error = invalid("A request has one Host header.")
        if len(hosts) == 1:
            error = ApiError(403, NOT_OURS, type="permission_error", code="host_not_allowed")
        await answer_with(error, scope, receive, send)


def _take_absolute_target(scope: Scope) -> None:
    """Split a target that is an absolute URL into path and Host: RFC 9112, section 3.2.2."""
    if target := ABSOLUTE.fullmatch(scope.get("raw_path") or b""):
        host, path = target[1], target[2] or b"/"
        others = [field for field in scope["headers"] if field[0] != b"host"]
        headers = [(b"host", host), *others]
        scope.update(raw_path=path, path=unquote(path.decode("ascii")), headers=headers)
