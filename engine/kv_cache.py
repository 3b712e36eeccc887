"""What the scheduler asks of the cache: counts and booleans, never pages."""

from collections.abc import Sequence
from typing import Protocol

from engine.types import BlockHashes, MissReason, PrefixSalt, Turns
from kvcache.sequences import Progress


class KVCache(Protocol):
    """What the scheduler asks of the cache. Tokens are counted from a sequence's first one."""

    def block_hashes(self, salt: PrefixSalt) -> BlockHashes:
        """Return the empty block hashes of a new sequence."""

    def open(
        self,
        seq_id: int,
        block_hashes: BlockHashes,
        num_tokens: int,
        *,
        final_tokens: int,
        system_tokens: int,
        turns: Turns,
    ) -> Progress | None:
        """Give the sequence a buffer, its cached prefix, and blocks for so many tokens. Return its
        progress; None where it does not fit now."""

    def attach_cached(self, seq_id: int) -> int:
        """Map what others have computed meanwhile; return how many tokens have valid K and V."""

    def fork(self, seq_id: int, child_id: int) -> int:
        """Do the same for a child, from its parent's blocks."""

    def add_pending_prefix(self, seq_id: int) -> None:
        """Let others wait for the tokens that the sequence is going to compute."""

    def pending_owner(self, seq_id: int) -> int | None:
        """Return the sequence that is going to compute the tokens that this one needs next."""

    def explain(self, seq_id: int) -> tuple[int, MissReason | None]:
        """Return where the sequence left what is cached, and why."""

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Map memory for tokens [0, num_tokens); False where there is none."""

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Note that the next positions hold valid K and V."""

    def cancel_steps(self, seq_id: int) -> None:
        """Cancel the sequence's steps that have not committed."""

    def close(self, seq_id: int, *, keep_prefix: bool) -> None:
        """Close the sequence."""

    @property
    def wants_mapping_point(self) -> bool:
        """Return whether something was refused that can be had when no step is in flight."""

    @property
    def recovering(self) -> bool:
        """Return whether memory of closed sequences is not free yet."""
