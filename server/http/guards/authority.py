"""A host and a port, as they stand in URLs and in the Host header: RFC 3986, section 3.2."""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_.-]+))(?::(?P<port>[0-9]{0,5}))?"
)
Address = IPv4Address | IPv6Address


class Authority(NamedTuple):
    """In a form that can be compared."""

    host: str | Address
    """A name in lower case without the dot at its end, or an address."""
    port: str
    """Empty where there is none."""


def read_authority(text: str) -> Authority | None:
    """Read a host and a port; None for what is none, and for names that resolvers would take in
    another way."""
    found = AUTHORITY.fullmatch(text.lower())
    if found is None:
        return None
    port = found["port"] or ""
    if found["v6"] is not None:
        address = read_address(found["v6"])
        # Brackets are for IPv6 alone; but this may be an IPv4 address in disguise.
        return None if address is None or ":" not in found["v6"] else Authority(address, port)
    name = found["name"].removesuffix(".")
    return Authority(read_address(name) or name, port) if name.strip(".") else None


def read_address(text: str) -> Address | None:
    """Read an IP address; one of IPv4 that is written as IPv6 is one of IPv4."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str | Address) -> bool:
    """Return whether an address can only be this machine."""
    return host == "localhost" if isinstance(host, str) else host.is_loopback
