"""The scheduler's sequences in the cache: they share prefixes, instead of computing them again."""

from collections.abc import Iterable, Mapping

from engine.kv_cache import KVCache
from engine.sequence import Sequence, SequenceStatus
from engine.step_plan import Attached, CacheDecision, Closed, Forked, Opened


class Sharing:
    """Opens sequences with their cached prefixes, closes them, and finds out which sequences wait
    for others. Notes what the cache decides, for the next plan."""

    def __init__(self, kv: KVCache, by_id: Mapping[int, Sequence]) -> None:
        """by_id: the scheduler's sequences, by their numbers."""
        self.kv = kv
        self._by_id = by_id
        self._decisions: list[CacheDecision] = []

    def take_decisions(self) -> tuple[CacheDecision, ...]:
        """Return what the cache has decided since the last call, in order."""
        decisions = tuple(self._decisions)
        self._decisions.clear()
        return decisions

    def attach_cached(self, sequences: Iterable[Sequence], *, in_parts: bool) -> None:
        """Attach what others have computed of the sequences' tokens: all of it at once, when the
        owner has computed it. ``in_parts``: block by block, because each attached block frees a
        reserved one, and with these a waiting sequence could be admitted."""
        for sequence in sequences:
            if sequence.num_scheduled > sequence.num_computed:
                continue
            if sequence.num_uncomputed > 1 and (in_parts or not self.waits_for_owner(sequence)):
                self._attach_cached(sequence)

    def _attach_cached(self, sequence: Sequence) -> None:
        parent, before = self._parent_of(sequence), sequence.num_computed
        if parent is not None and sequence.num_generated == 0:
            forked = self.kv.fork(parent.seq_id, sequence.seq_id)
            if forked > before:
                self._decisions.append(Forked(parent.seq_id, sequence.seq_id, forked))
                before = forked
        attached = self.kv.attach_cached(sequence.seq_id)
        if attached > before:
            self._decisions.append(Attached(sequence.seq_id, attached))

    def open(self, sequence: Sequence) -> bool:
        """Reserve memory for the sequence's tokens, and for one more if there will be one. False
        when there is none now."""
        if sequence.block_hashes is None:
            sequence.block_hashes = self.kv.block_hashes(sequence.request.salt)
        sequence.block_hashes.extend(sequence.token_ids, 0)
        sequence.block_hashes.max_cached_tokens = sequence.num_reusable
        # The last token that is sampled is never computed.
        final = max(sequence.max_tokens - 1, sequence.num_prompt)
        num_tokens, system = min(sequence.num_tokens + 1, final), sequence.request.system_tokens
        progress = self.kv.open(
            sequence.seq_id,
            sequence.block_hashes,
            num_tokens,
            final_tokens=final,
            system_tokens=system,
            turns=sequence.request.turns,
        )
        if progress is None:
            return False
        sequence.progress = progress
        tokens, salt = tuple(sequence.token_ids), sequence.request.salt
        reusable = sequence.block_hashes.max_cached_tokens
        self._decisions.append(
            Opened(
                sequence.seq_id,
                tokens,
                salt,
                reusable,
                num_tokens,
                final,
                system,
                sequence.request.turns,
            )
        )
        return True

    def close(self, sequence: Sequence, *, keep_prefix: bool, preempted: bool = False) -> None:
        """Free the sequence's memory. keep_prefix: whether what it has computed may be shared."""
        self.kv.close(sequence.seq_id, keep_prefix=keep_prefix)
        self._decisions.append(Closed(sequence.seq_id, keep_prefix, preempted))

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
