"""Refuse requests for names that are not this server's.

A web page may give its own name our address (DNS rebinding); the browser then takes our answers for
the page's. Its requests still carry the page's name in their Host header, so that is where they are
refused: on every path, and before anything else is looked at.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import Config, SettingError
from server.http.errors import answer_with
from server.http.guards.authority import Address, read_address, read_authority
from server.metrics.requests import CountRefusal, Refusal
from server.protocol.wire_errors import ApiError, invalid

OWN_NAMES = ("localhost", "127.0.0.1", "[::1]", "host.docker.internal")
ABSOLUTE = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Names and addresses, whatever the port."""

    hosts: frozenset[str | Address]
    any_address: bool
    """Whether all addresses are allowed, because all are listened on: rebinding needs a name."""

    @classmethod
    def of(cls, settings: Config) -> "AllowedHosts":
        """Read the names of settings. Raises SettingError for what is no name."""
        listened = settings.server.host
        names = [*OWN_NAMES, *settings.access.allowed_hosts]
        if listened not in WILDCARDS:
            names.append(f"[{listened}]" if ":" in listened else listened)
        hosts: set[str | Address] = set()
        for name in names:
            # An address may be written without brackets here.
            found = read_address(name) or getattr(read_authority(name), "host", None)
            if found is None:
                raise SettingError(
                    f"setting access.allowed_hosts: {name!r} is no host name; write it as "
                    '"name.example", without scheme and wildcards'
                )
            hosts.add(found)
        return cls(frozenset(hosts), listened in WILDCARDS)

    def has(self, host: str) -> bool:
        """Return whether a Host header names this server."""
        found = read_authority(host)
        if found is None:
            return False
        return found.host in self.hosts or (self.any_address and not isinstance(found.host, str))


class HostGuard:
    """Refuse requests for other names."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts, count: CountRefusal) -> None:
        self._app = app
        self._allowed = allowed
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 400 without a Host header or with several, 403 for a name that is not ours."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _take_absolute_target(scope)
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and self._allowed.has(hosts[0].decode("latin-1")):
            await self._app(scope, receive, send)
            return
        self._count(Refusal.HOST)
        error = _not_ours() if len(hosts) == 1 else invalid("A request has one Host header.")
        await answer_with(error, scope, receive, send)


def _take_absolute_target(scope: Scope) -> None:
    """Replace a target in absolute form by its path, and the Host header by its authority. RFC
    9112, section 3.2.2."""
    if found := ABSOLUTE.fullmatch(scope.get("raw_path") or b""):
        host, path = found[1], found[2] or b"/"
        others = [field for field in scope["headers"] if field[0] != b"host"]
        headers = [(b"host", host), *others]
        scope.update(raw_path=path, path=unquote(path.decode("ascii")), headers=headers)


def _not_ours() -> ApiError:
    return ApiError(
        403,
        "This server does not go by the name in the request's Host header; setting "
        "access.allowed_hosts adds names.",
        type="permission_error",
        code="host_not_allowed",
    )
