"""The KV cache's interface for the scheduler and the runner, by sequence ids and token counts.

A sequence that begins like another one maps the other's sealed (full, read-only) blocks instead of
computing K and V again. What the layers keep is the groups' concern: every verb is a loop over
them, and a sequence is at the same position in all."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvcache.backends.backend import BackendFailedError, PageBackend, Releases, StateMemory
from kvcache.block_hashes import BlockHashes, PrefixSalt
from kvcache.budget import CacheLimits
from kvcache.groups import make_groups
from kvcache.groups.base import StepTokens, evict_cheapest, match_all
from kvcache.inspector import KVMap
from kvcache.layout import KVLayout
from kvcache.prefixes import PendingPrefixes
from kvcache.sequences import NO_BOUNDARIES, CachedSequence, Progress, PromptBoundaries
from kvcache.stats import NO_DISK, DiskStats, KVStats, MissReason, total
from kvcache.tier.store import RecordStore
from kvcache.tier.tier import DiskTier, model_tag
from kvcache.views import KVViews, OrderingHandles, layer_regions

NO_DRAFTS: Mapping[int, int] = MappingProxyType({})


class KVCacheManager:
    """All sequences, buffers and blocks of one engine. Only the engine thread may call methods."""

    def __init__(
        self,
        layout: KVLayout,
        backends: Sequence[PageBackend],
        limits: CacheLimits,
        *,
        identity: bytes,
        states: StateMemory | None = None,
    ) -> None:
        """See make_groups. ``identity`` identifies the model's content."""
        self._layout = layout
        self._limits = limits
        # The size of heaps is left out: block hashes must not depend on the memory of the machine.
        self.identity = identity + repr((layout.shape, layout.tokens_per_block)).encode()
        self._backends = tuple(backends)
        self._pending = PendingPrefixes()
        self._groups = make_groups(layout, backends, limits, states, self._pending)
        self._layers = layer_regions(layout)
        self._order = OrderingHandles(len(self._layers), len(layout.shape.states))
        self._open: dict[int, CachedSequence] = {}
        releases = backends[0].releases
        self.releases_memory = not releases.keeps_heaps
        """True if memory can go back to the system before the process ends."""
        self.releases_at_any_time = releases in (Releases.BLOCKS, Releases.HEAPS)
        """True if memory can go back to the system while steps run, as on a CPU."""
        self.mapping_waits = 0
        """The number of steps that had to wait for a mapping of memory."""
        self._issued_epoch = self._completed_epoch = 0
        self._maps_while_running = backends[0].maps_while_running
        self._tier: DiskTier | None = None

    def use_disk(
        self, store: RecordStore, seconds: Callable[[int, int], float], *, way: str, name: str
    ) -> None:
        """Keep prefixes in files. See DiskTier. ``way`` is all but the model and the layout on
        which the bits of K and V depend; ``name`` is the model's, for people."""
        tag = model_tag(self.identity, way)
        store.name_model(tag, name)
        size = self._layout.tokens_per_block
        self._tier = DiskTier(
            store,
            self._groups,
            tag=tag,
            tokens_per_block=size,
            prepare=self._finish_mappings,
            seconds=seconds,
        )

    # --- for the scheduler: opening sequences -----------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sequence that fit into an address range and into the cache."""
        return min(group.capacity_tokens for group in self._groups)

    def block_hashes(self, salt: PrefixSalt) -> BlockHashes:
        return BlockHashes(self.identity, salt, self._layout.tokens_per_block)

    def open(
        self,
        seq_id: int,
        block_hashes: BlockHashes,
        num_tokens: int,
        *,
        final_tokens: int,
        boundaries: PromptBoundaries = NO_BOUNDARIES,
    ) -> Progress | None:
        """Open a sequence: take buffers, map the cached blocks of its prefix, and reserve blocks
        for ``num_tokens``. Return the progress, which the cache updates, or None if memory is short
        now. ``final_tokens`` is the most tokens that the sequence may reach. ``boundaries`` are
        positions at which other prompts may begin to differ."""
        assert seq_id not in self._open, f"sequence {seq_id} is open"
        if len(self._open) == self._limits.max_sequences or num_tokens > self._layout.max_tokens:
            return None
        if not all(group.has_room(block_hashes, num_tokens) for group in self._groups):
            self._note_short()
            return None
        sequence = CachedSequence(seq_id, block_hashes, num_tokens, final_tokens, boundaries)
        longest, wanted = match_all(self._groups, block_hashes, 0)
        # If mapping the cached prefix needs too many mappings, open the sequence without it.
        for position in dict.fromkeys((longest, 0)):
            if self._open_at(sequence, position, wanted):
                self._open[seq_id] = sequence
                if self._tier is not None:
                    sequence.disk_miss = self._tier.forget(seq_id)
                    self._tier.note_hit(sequence, position)
                return sequence.progress
            if self.wants_mapping_point:
                break  # sharing can succeed when no step is in flight
        self._note_short()
        return None

    def _note_short(self) -> None:
        """Let the tier write with rests, in which its memory can be used for a new sequence."""
        if self._tier is not None and not self.wants_mapping_point:
            self._tier.note_short()

    def _open_at(self, sequence: CachedSequence, position: int, wanted: int) -> bool:
        """Open a sequence in all groups. Return False and leave no mapping if one group fails."""
        for number, group in enumerate(self._groups):
            if not group.open(sequence, position, wanted, alone=not self._open):
                for opened in self._groups[:number]:
                    opened.truncate(sequence.seq_id, 0)
                    opened.close(sequence.seq_id, self._issued_epoch)
                return False
        sequence.progress.restart_at(position * self._layout.tokens_per_block)
        return True

    def attach_cached(self, seq_id: int) -> int:
        """Map blocks that other sequences have sealed meanwhile. Return the number of the
        sequence's tokens with valid K and V."""
        sequence = self._open[seq_id]
        if all(group.can_attach(seq_id) for group in self._groups):
            start = sequence.progress.computed // self._layout.tokens_per_block
            position, _ = match_all(self._groups, sequence.block_hashes, start)
            self._attach(sequence, position)
        return sequence.progress.computed

    def fork(self, seq_id: int, child_id: int) -> int:
        """Give a child sequence with the same prompt the parent's K and V, except those of the last
        token: share sealed blocks, copy the partial block. Return the number of the child's tokens
        with valid K and V. Do nothing if the parent's full blocks are not sealed yet."""
        parent, child = self._open[seq_id], self._open[child_id]
        num_tokens = child.block_hashes.num_tokens - 1
        whole, partial = divmod(num_tokens, self._layout.tokens_per_block)
        computed = child.progress.computed
        if parent.progress.computed < num_tokens:
            return computed
        if not all(group.can_fork(seq_id, child_id, whole) for group in self._groups):
            return computed
        attached = self._attach(child, whole, parent_id=seq_id)
        if attached and partial and self.reserve(child_id, num_tokens):
            self._finish_mappings()
            for group in self._groups:
                group.copy_block(seq_id, child_id, whole, partial)
            child.progress.restart_at(num_tokens)
        return child.progress.computed

    def _attach(
        self, sequence: CachedSequence, position: int, parent_id: int | None = None
    ) -> bool:
        """See KVGroup.attach. Return False and change nothing if one group fails."""
        size = self._layout.tokens_per_block
        before = sequence.progress.computed // size
        if position == before:
            return True
        for number, group in enumerate(self._groups):
            if not group.attach(sequence.seq_id, position, parent_id):
                for attached in self._groups[:number]:
                    attached.truncate(sequence.seq_id, before)
                return False
        sequence.progress.restart_at(position * size)
        return True

    def add_pending_prefix(self, seq_id: int) -> None:
        """Let other sequences wait for the blocks that this sequence is going to compute."""
        sequence = self._open[seq_id]
        if sequence in self._pending:
            return  # a later chunk of the same prompt
        first, *others = [group.positions_to_share(seq_id) for group in self._groups]
        positions = [position for position in first if all(position in each for each in others)]
        self._pending.add(sequence, positions)

    def pending_owner(self, seq_id: int) -> int | None:
        """Return the id of the sequence that will compute this sequence's next blocks, or None."""
        sequence = self._open[seq_id]
        owner = self._pending.awaited(sequence)
        if owner is None and self._pending and all(g.can_attach(seq_id) for g in self._groups):
            start = sequence.progress.computed // self._layout.tokens_per_block
            owner = self._pending.find(sequence, start)
        return None if owner is None else owner.seq_id

    def explain(self, seq_id: int) -> tuple[int, MissReason | None]:
        """Return two things: the length of the longest cached prefix in tokens, and the reason that
        the sequence shares no more. The reason is None if all that it may share is cached."""
        cached, miss = self._open[seq_id].block_hashes.num_tokens, None
        for group in self._groups:
            cached, reason = group.explain(seq_id, cached)
            miss = reason or miss
        return cached, miss and (self._open[seq_id].disk_miss or miss)

    # --- for the scheduler: growing and closing sequences -----------------------------------------

    def reserve(self, seq_id: int, num_tokens: int, drafts: int = 0) -> bool:
        """Get memory for tokens [0, num_tokens). Return False if memory is short or if mappings may
        not change now; the sequence then keeps what it has got."""
        fits = all(group.reserve(seq_id, num_tokens, drafts) for group in self._groups)
        is_short = not (fits or drafts or self.wants_mapping_point)
        if is_short and self._tier is not None:
            self._tier.give_up_reads()  # running sequences come first
        return fits

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Note that the K and V of the next ``len(token_ids)`` positions are valid."""
        sequence = self._open[seq_id]
        start = sequence.progress.computed
        end = start + len(token_ids)
        sequence.block_hashes.extend(token_ids, start)
        epoch = sequence.commit(end)
        # A sealed block is never written again. So blocks are sealed up to where steps can restart.
        before = sequence.progress.settled
        settled = min([end, *(group.settled(seq_id, end) for group in self._groups)])
        for group in self._groups:
            group.commit(seq_id, before, settled, epoch)
        sequence.progress.settled = settled

    def cancel_steps(self, seq_id: int) -> None:
        """Drop all planned steps. The sequence goes on at the last position that all groups can
        return to."""
        sequence = self._open[seq_id]
        sequence.steps.clear()
        sequence.progress.restart_at(min([g.cancel_steps(seq_id) for g in self._groups]))

    def close(self, seq_id: int, *, keep_prefix: bool = True) -> None:
        """Close a sequence. The sequence's blocks are kept until the newest step has completed.
        With ``keep_prefix``, other sequences may share the blocks that this sequence wrote."""
        sequence = self._open.pop(seq_id)
        sequence.keeps_prefix = keep_prefix
        self._pending.withdraw(sequence)
        for group in self._groups:
            group.close(seq_id, self._issued_epoch)
        if self._tier is not None:
            self._tier.note_end(sequence)

    @property
    def wants_mapping_point(self) -> bool:
        """True if memory was refused only because mappings may not change while a step runs."""
        return any(group.wants_mapping_point for group in self._groups)

    @property
    def recovering(self) -> bool:
        """True if memory of closed sequences or of the tier will still become free, or prefixes are
        read."""
        moving = self._tier is not None and self._tier.recovering
        return moving or any(group.recovering for group in self._groups)

    @property
    def transfers_may_end(self) -> bool:
        """True if the tier still reads or writes, and does not seem to hang."""
        return self._tier is not None and self._tier.transfers_may_end

    # --- for the scheduler: prefixes in files -----------------------------------------------------

    def waits_for_disk(
        self, seq_id: int, hashes: BlockHashes, boundaries: PromptBoundaries
    ) -> bool:
        """Return True while a sequence that is not open waits for its prefix to be read. The first
        call begins to read, if that is faster than computing."""
        if self._tier is None or not hashes.salt.may_be_written:
            return False
        return self._tier.waits(seq_id, hashes, boundaries)

    def stop_waiting(self, seq_id: int) -> None:
        """Note that a sequence will not be opened."""
        if self._tier is not None:
            self._tier.forget(seq_id)

    def write_to_disk(self, limit_s: float) -> None:
        """Write the ends of conversations to files now, for this long at most."""
        if self._tier is None:
            return
        self._tier.write_ends_now()
        until = time.monotonic() + limit_s
        while time.monotonic() < until and self._tier.is_writing(until):
            time.sleep(min(limit_s, self._tier.poll_s()))
            self.step_completed(self._completed_epoch)

    def disk_poll_s(self) -> float:
        """Return after how many seconds ``step_completed`` should be called again."""
        return math.inf if self._tier is None else self._tier.poll_s()

    def disk_stats(self) -> DiskStats:
        return NO_DISK if self._tier is None else self._tier.stats()

    # --- for the runner: the steps ----------------------------------------------------------------

    def views(
        self, segments: Sequence[tuple[int, int, int]], drafts_of: Mapping[int, int] = NO_DRAFTS
    ) -> KVViews:
        """Return the views of a step (access to K and V), and give the step an epoch (number).
        ``segments`` are ``(seq_id, start, count)``, in which ``count`` includes the sequence's
        drafts. Sequences with one row, or with drafts, come first."""
        epoch = self._issued_epoch + 1
        plan = [StepTokens(*segment, drafts_of.get(segment[0], 0)) for segment in segments]
        for seq_id, start, count, drafts in plan:
            sequence = self._open[seq_id]
            assert start == sequence.next_start, f"{seq_id}: {start} != {sequence.next_start}"
            sequence.schedule(start + count, drafts, epoch)
        self.mapping_waits += max([group.take_waits() for group in self._groups])
        if not self._maps_while_running and self._is_quiet:
            for group in self._groups:
                group.top_up(plan)
            self._finish_mappings()
        counts = [n for each in plan for n in ([1] * each.count if each.drafts else [each.count])]
        views = KVViews(self._layers, self._order, counts, epoch)
        for group in self._groups:
            group.schedule(plan, epoch, views)
        self._issued_epoch = epoch
        return views

    def preview(self, tokens: Sequence[tuple[int, int]]) -> KVViews:
        """Return views to compute a token each of ``(seq_id, position)``, which the next step
        computes again. Memory for it is reserved, and it is evaluated before the next step."""
        plan = [StepTokens(seq_id, position, 1) for seq_id, position in tokens]
        self._finish_mappings()
        views = KVViews(self._layers, self._order, [1] * len(plan), self._issued_epoch)
        for group in self._groups:
            group.preview(plan, views)
        return views

    @property
    def _is_quiet(self) -> bool:
        return self._completed_epoch == self._issued_epoch

    def _finish_mappings(self) -> None:
        for backend in self._backends:
            backend.finish_mappings()

    def step_completed(self, completed_epoch: int) -> None:
        """Note that all steps up to the epoch have completed; free the memory that waited for
        them."""
        assert completed_epoch <= self._issued_epoch
        self._completed_epoch = max(self._completed_epoch, completed_epoch)
        for group in self._groups:
            group.step_completed(self._completed_epoch, is_quiet=self._is_quiet)
        if self._tier is not None:
            self._tier.update()

    def release_idle_memory(self) -> None:
        """Release the memory of free state slots and of free blocks, except one heap. No sequence
        may be open."""
        self.step_completed(self._completed_epoch)
        for group in self._groups:
            group.release_idle()

    def evict_prefixes(self) -> None:
        """Evict some cached prefixes, few enough that no step is delayed, and release memory."""
        evict_cheapest(self._groups)
        self._release_slack()

    def set_limit(self, limit_bytes: int) -> int:
        """Set the limit of used bytes. Return the limit in effect, which may be higher: the blocks
        in use, one full sequence, and the memory that cannot be released must each fit."""
        blocks = [*self._layout.blocks_within(limit_bytes), 0]  # states have memory of their own
        allowed = sum([group.set_limit(n) for group, n in zip(self._groups, blocks, strict=False)])
        self._release_slack()
        return allowed

    def set_memory_pressure(self, *, short: bool) -> None:
        for group in self._groups:
            group.set_memory_pressure(short=short)
        self._release_slack()

    def _release_slack(self) -> None:
        for group in self._groups:
            group.release_slack(runs=bool(self._open) or not self._is_quiet)

    def shut_down(self) -> bool:
        """Shut all backends down. No other call may follow. Return False if the device did not
        answer; the process must then end without releasing memory."""
        if self._tier is not None and not self._tier.close():
            return False
        ended = [backend.shut_down() for backend in self._backends]
        return all(ended)

    def backend_fault(self) -> BackendFailedError | None:
        """Return the failure of the memory's backend, or None. Any thread may call this."""
        try:
            for backend in self._backends:
                backend.completed_ticket()
        except BackendFailedError as error:
            return error
        return None

    @property
    def copied_bytes(self) -> int:
        return sum(backend.copied_bytes for backend in self._backends)

    @property
    def command_buffers(self) -> int:
        return max(backend.command_buffers for backend in self._backends)

    def stats(self) -> KVStats:
        parts = [group.stats() for group in self._groups]
        blocks = [part.capacity_bytes // part.block_bytes for part in parts if part.block_bytes]
        tokens = self._layout.tokens_in(blocks, self._limits.max_step_tokens)
        return total(parts, tokens)

    def memory_map(self) -> KVMap:
        kv_map = KVMap()
        for group in self._groups:
            group.add_to(kv_map)
        return kv_map

    def check_invariants(self) -> None:
        for group in self._groups:
            group.check_invariants()
