"""Hashes of a sequence's full blocks. Equal hashes mean equal tokens up to the block's end. A hash
is SHA-256(hash of the block before, token ids of the block). For the first block, a hash of the
model, the layout and the salt replaces the hash of the block before."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from struct import Struct

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class PrefixSalt:
    """The salt of a request's block hashes: requests share blocks only if their salts are equal."""

    tenant: bytes = b""
    """Bytes that the server derives from the API key, and never from the request's body."""
    client: bytes = b""
    """The salt that the request itself names."""
    may_be_written: bool = field(default=False, compare=False)
    """True if blocks with this salt may be kept in files."""


class BlockHashes:
    """The hashes of one sequence's full blocks. Adding tokens extends the list. ``tokens[i]`` are
    block i's token ids as big-endian uint32, so that bytes sort as ids do."""

    def __init__(self, identity: bytes, salt: PrefixSalt, tokens_per_block: int) -> None:
        """``identity`` identifies the model and the layout. Every hash depends on it."""
        self.tokens_per_block = tokens_per_block
        self.salt = salt
        self.num_tokens = 0
        """The number of tokens so far, including the tokens after the last full block."""
        self.max_cached_tokens: int | None = None
        """The number of leading tokens that may come from the cache; None allows all but the
        last."""
        self.tokens: list[bytes] = []
        self.digests: list[bytes] = []
        self._packed = Struct(f">{tokens_per_block}I")
        self._tail: list[int] = []
        # Hash each part before joining, because different parts could join to the same bytes.
        parts = (identity, salt.tenant, salt.client)
        self._root = sha256(b"".join(sha256(part).digest() for part in parts)).digest()

    @property
    def shareable_blocks(self) -> int:
        """The number of leading full blocks that may come from the cache."""
        limit = self.max_cached_tokens
        limit = self.num_tokens - 1 if limit is None else limit
        return max(0, limit) // self.tokens_per_block

    @property
    def tail(self) -> bytes:
        """The token ids after the last full block, as big-endian uint32."""
        return Struct(f">{len(self._tail)}I").pack(*self._tail)

    def parent(self, block: int) -> bytes:
        return self.digests[block - 1] if block else self._root

    def extend(self, token_ids: Sequence[int], start: int) -> None:
        """Add token ids from position ``start`` on. Skip positions that were added before."""
        known = self.num_tokens
        assert start <= known, f"tokens {known} to {start} are missing"
        new = token_ids[known - start :]
        self._tail += new
        self.num_tokens += len(new)
        if len(self._tail) < self.tokens_per_block:
            return
        whole = len(self._tail) // self.tokens_per_block * self.tokens_per_block
        for first in range(0, whole, self.tokens_per_block):
            self._add(self._packed.pack(*self._tail[first : first + self.tokens_per_block]))
        del self._tail[:whole]

    def _add(self, tokens: bytes) -> None:
        self.digests.append(sha256(self.parent(len(self.digests)) + tokens).digest())
        self.tokens.append(tokens)
