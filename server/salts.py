"""With whom a request shares prefixes."""

import hmac
import secrets

from engine.types import PrefixSalt

SECRET_BYTES = 32


class Salts:
    """Makes salts that nobody outside of this process can make, or trace to what they came from."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)

    def salt(self, authorization: str | None, cache_salt: str | None) -> PrefixSalt:
        """authorization: the header, whose bearer token is the tenant's key; all without one are
        one tenant. cache_salt: the request's own."""
        client = b"" if cache_salt is None else self._hashed(cache_salt)
        return PrefixSalt(self._hashed(bearer_token(authorization)), client)

    def _hashed(self, text: str) -> bytes:
        return hmac.digest(self._secret, text.encode(), "sha256")


def bearer_token(authorization: str | None) -> str:
    """The API key of a request; empty when it carries none. RFC 6750, section 2.1."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
