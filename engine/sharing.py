"""Shares prefixes between the scheduler's sequences, instead of computing them again."""

from collections.abc import Iterable, Mapping

from engine.kv_door import KVDoor
from engine.types import Sequence, SequenceStatus


class Sharing:
    """Opens sequences with their cached prefixes, and finds out which sequences wait for others."""

    def __init__(self, kv: KVDoor, by_id: Mapping[int, Sequence]) -> None:
        """by_id: the scheduler's sequences, by their numbers."""
        self.kv = kv
        self._by_id = by_id

    def attach_cached(self, sequences: Iterable[Sequence], *, in_parts: bool) -> None:
        """Attach what others have computed of the sequences' tokens: all of it at once, when the
        owner has computed it. ``in_parts``: block by block, because each attached block frees a
        reserved one, and with these a waiting sequence could be admitted."""
        for sequence in sequences:
            if sequence.num_scheduled > sequence.num_computed:
                continue
            if sequence.num_uncomputed > 1 and (in_parts or not self.waits_for_owner(sequence)):
                parent = self._parent_of(sequence)
                if parent is not None and sequence.num_generated == 0:
                    self.kv.fork(parent.seq_id, sequence.seq_id)
                cached = self.kv.attach_cached(sequence.seq_id)
                sequence.num_computed = sequence.num_scheduled = cached

    def open(self, sequence: Sequence) -> bool:
        """Reserve memory for the sequence's tokens, and for one more if there will be one. False
        when there is none now."""
        if sequence.block_hashes is None:
            sequence.block_hashes = self.kv.block_hashes(sequence.request.salt)
        sequence.block_hashes.extend(sequence.token_ids, 0)
        sequence.block_hashes.max_cached_tokens = sequence.num_reusable
        # The last token that is sampled is never computed.
        final = max(sequence.max_tokens - 1, sequence.num_prompt)
        return self.kv.open(
            sequence.seq_id,
            sequence.block_hashes,
            min(sequence.num_tokens + 1, final),
            final_tokens=final,
            system_tokens=sequence.request.system_tokens,
        )

    def waits_for_parent(self, child: Sequence) -> bool:
        """Return whether a fork's parent is still computing the prompt that both have."""
        parent = self._parent_of(child)
        return parent is not None and parent.num_computed < child.num_prompt

    def _parent_of(self, child: Sequence) -> Sequence | None:
        """Return the running sequence whose pages a fork can share, if it may share any."""
        number = child.request.fork_of if child.num_reusable is None else None
        parent = self._by_id.get(number) if number is not None else None
        running = parent is not None and parent.status is SequenceStatus.RUNNING
        return parent if running else None

    def waits_for_owner(self, sequence: Sequence) -> bool:
        """Return whether an earlier sequence is computing this one's next tokens. The earlier one
        gets the budget first: waiting for it costs no time, and computing them twice would."""
        owner = self.kv.pending_owner(sequence.seq_id)
        return owner is not None and self._by_id[owner].order < sequence.order
