"""Check the settings that say who may ask, before anything is loaded."""

import socket

from server.config import Config, SettingError
from server.http.guards.authority import is_loopback, read_address
from server.http.guards.hosts import WILDCARDS, AllowedHosts
from server.http.guards.keys import Keys
from server.http.guards.origins import AllowedOrigins


def check_access(settings: Config) -> None:
    """Check who may reach the server. Raises SettingError that names the setting to change."""
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
    """Return whether programs of other machines cannot reach the address. host: as in
    server.host."""
    if host in WILDCARDS:
        return False
    address = read_address(host)
    if address is not None:
        return is_loopback(address)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [read_address(str(place[0])) for *_, place in found]
    return all(address is not None and is_loopback(address) for address in addresses)
