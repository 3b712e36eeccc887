"""What sequences take over from one another, instead of computing it."""

from collections.abc import Iterable, Mapping

from engine.kv_door import KVDoor
from engine.types import Sequence, SequenceStatus


class Sharing:
    """Opens sequences with what the cache has of them, and says who waits for whom."""

    def __init__(self, kv: KVDoor, by_id: Mapping[int, Sequence]) -> None:
        """by_id: the scheduler's sequences, by their numbers."""
        self.kv = kv
        self._by_id = by_id

    def adopt(self, sequences: Iterable[Sequence], *, in_parts: bool) -> None:
        """Takes what others have computed of their tokens: all of it at once, but ``in_parts``
        while the blocks that were set aside for that could let somebody in."""
        for sequence in sequences:
            if sequence.num_scheduled > sequence.num_computed:
                continue
            if sequence.num_uncomputed > 1 and (in_parts or not self.is_behind(sequence)):
                parent = self._parent_of(sequence)
                if parent is not None and sequence.num_generated == 0:
                    self.kv.fork(parent.seq_id, sequence.seq_id)
                sequence.num_computed = sequence.num_scheduled = self.kv.adopt(sequence.seq_id)

    def open(self, sequence: Sequence) -> bool:
        """Memory for what the sequence has, and for one more token if there will be one."""
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

    def parent_is_ahead(self, child: Sequence) -> bool:
        """Whether a fork's parent is still computing the prompt that both have."""
        parent = self._parent_of(child)
        return parent is not None and parent.num_computed < child.num_prompt

    def _parent_of(self, child: Sequence) -> Sequence | None:
        """The running sequence whose pages a fork can have, if it has a use for them."""
        number = child.request.fork_of if child.num_reusable is None else None
        parent = self._by_id.get(number) if number is not None else None
        running = parent is not None and parent.status is SequenceStatus.RUNNING
        return parent if running else None

    def is_behind(self, sequence: Sequence) -> bool:
        """Whether one ahead of the sequence is computing its next tokens. That one gets the budget
        first, so that waiting costs no time, and computing them twice would."""
        claimant = self.kv.claimant(sequence.seq_id)
        return claimant is not None and self._by_id[claimant].order < sequence.order
