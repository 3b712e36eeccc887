"""Compute salts of prompts: only prompts with equal salts share cached prefixes."""

import hmac
from collections.abc import Mapping

from engine.types import PrefixSalt

# White space that may surround a header's value (RFC 9110, section 5.6.3).
OWS = " \t"


class Salts:
    """Computes salts. To forge a salt, or to find the API key that made it, takes the secret."""

    def __init__(self, secret: bytes, *, outlives_process: bool = False) -> None:
        """outlives_process: the next process will have the same secret. Else no prompt is written
        to disk, because none would be found again."""
        self._secret, self._outlives_process = secret, outlives_process

    @property
    def digest_key(self) -> bytes:
        """Return a key for digests of prompts."""
        return self._hashed("digests of prompts")

    def salt(
        self, key: str, cache_salt: str | None, *, stays_in_memory: bool = False
    ) -> PrefixSalt:
        """Return a prompt's salt. ``key`` is the API key; requests without one share a tenant.
        stays_in_memory: the client wants neither prompt nor answer on disk."""
        client = b"" if cache_salt is None else self._hashed(cache_salt)
        may_be_written = self._outlives_process and not stays_in_memory
        return PrefixSalt(self._hashed(key), client, may_be_written)

    def _hashed(self, text: str) -> bytes:
        return hmac.digest(self._secret, text.encode(), "sha256")


def request_key(headers: Mapping[str, str]) -> str:
    """Return the API key in a request's headers, or "". ``headers`` must ignore case. The header
    Authorization has a bearer token: RFC 6750, section 2.1."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip(OWS) if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key", "").strip(OWS)
