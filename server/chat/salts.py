"""Salts: with whom a request shares prefixes."""

import hmac
from collections.abc import Mapping

from engine.types import PrefixSalt

# What may stand around a field's value and is no part of it: RFC 9110, section 5.6.3.
OWS = " \t"


class Salts:
    """Make salts that nobody without the secret can make, or trace to what they came from."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def salt(self, key: str, cache_salt: str | None) -> PrefixSalt:
        """Return with whom a prompt may be shared. key: the tenant's; all without one (an empty
        key) are one tenant. cache_salt: the request's own."""
        client = b"" if cache_salt is None else self._hashed(cache_salt)
        return PrefixSalt(self._hashed(key), client)

    def _hashed(self, text: str) -> bytes:
        return hmac.digest(self._secret, text.encode(), "sha256")


def request_key(headers: Mapping[str, str]) -> str:
    """Return the API key of a request: the bearer's token, or x-api-key of Anthropic's clients;
    empty when it carries none. headers: found whatever the case of their names."""
    return bearer_token(headers.get("authorization")) or headers.get("x-api-key", "").strip(OWS)


def bearer_token(authorization: str | None) -> str:
    """Return the token in an Authorization header; empty when it has none. RFC 6750, section
    2.1."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip(OWS) if scheme.lower() == "bearer" else ""
