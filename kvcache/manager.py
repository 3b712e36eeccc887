"""The KV cache's interface for the scheduler and the runner, by sequence ids and token counts.

A sequence that begins like another one maps the other's sealed (full, read-only) blocks instead of
computing K and V again. Each sequence has the same number of blocks in every group of layers."""

from collections.abc import Sequence
from dataclasses import replace

from kvcache.backend import BackendFailedError, PageBackend, Releases, Segment, StateMemory
from kvcache.block import Block, SparseBuffer
from kvcache.block_allocator import BLOCKS_EVICTED_AT_ONCE, MAP_AHEAD_TOKENS
from kvcache.block_hashes import BlockHashes, PrefixSalt
from kvcache.group_cache import GroupCache
from kvcache.layout import KVLayout
from kvcache.memory_budget import CacheLimits
from kvcache.memory_map import KVMap, take_map
from kvcache.prefix_index import MissReason
from kvcache.sequences import CachedSequence, OpenSequence, Progress
from kvcache.slot_pool import SlotPool
from kvcache.state_cache import NO_BOUNDARIES, PromptBoundaries, StateCache, planned_checkpoints
from kvcache.stats import KVStats, total
from kvcache.views import KVViews, OrderingHandles, layer_regions


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
        """Pass one backend per group of layers. ``identity`` identifies the model's content.
        ``states`` is memory for recurrent states, or None if the model has no recurrent layers."""
        self._layout = layout
        self._limits = limits
        # The size of heaps is left out: block hashes must not depend on the memory of the machine.
        self.identity = identity + repr((layout.shape, layout.tokens_per_block)).encode()
        max_heaps = limits.budget_bytes // layout.heap_bytes
        self._groups = [
            GroupCache(group, backend, limits, max_heaps)
            for group, backend in zip(layout.groups, backends, strict=True)
        ]
        # If all groups of layers would give the same answer, the first one is asked.
        self._first = self._groups[0]
        self._layers = layer_regions(layout)
        self._order = OrderingHandles(len(self._layers), len(layout.shape.states))
        self._state_memory = states
        self._states: StateCache | None = None
        if states is not None:
            pool = SlotPool(states.num_slots, states.commit)
            index = self._first.prefixes.index
            self._states = StateCache(pool, index, layout.tokens_per_block)
        self._open: dict[int, OpenSequence] = {}
        releases = self._first.backend.releases
        self.releases_memory = releases is not Releases.NOTHING
        """True if memory can go back to the system before the process ends."""
        self.releases_at_any_time = releases in (Releases.BLOCKS, Releases.HEAPS)
        """True if memory can go back to the system while steps run, as on a CPU."""
        self.mapping_waits = 0
        """The number of steps that had to wait for a mapping of memory."""
        self._issued_epoch = self._completed_epoch = 0
        self._maps_while_running = self._first.backend.maps_while_running

    # --- for the scheduler: opening sequences -----------------------------------------------------

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sequence that fit into an address range and into the cache."""
        blocks = min(group.pool.capacity_blocks for group in self._groups)
        return min(self._layout.max_tokens, blocks * self._layout.tokens_per_block)

    def block_hashes(self, salt: PrefixSalt) -> BlockHashes:
        return BlockHashes(self.identity, salt, self._layout.tokens_per_block)

    def open(
        self,
        seq_id: int,
        block_hashes: BlockHashes,
        num_tokens: int,
        *,
        final_tokens: int,
        system_tokens: int = 0,
        boundaries: PromptBoundaries = NO_BOUNDARIES,
    ) -> Progress | None:
        """Open a sequence: take buffers, map the cached blocks of its prefix, and reserve blocks
        for ``num_tokens``. Return the progress, which the cache updates, or None if memory is short
        now. ``final_tokens`` is the most tokens that the sequence may reach. ``system_tokens`` is
        the length of the system prompt. ``boundaries`` are positions at which other prompts may
        begin to differ."""
        assert seq_id not in self._open, f"sequence {seq_id} is open"
        if len(self._open) == self._limits.max_sequences or num_tokens > self._layout.max_tokens:
            return None
        if self._states is not None and not self._states.has_room:
            return None
        needed = self._layout.blocks_for(num_tokens)
        own = needed - block_hashes.shareable_blocks
        if any(own > group.allocator.available_blocks for group in self._groups):
            return None
        system = system_tokens // self._layout.tokens_per_block
        longest, cached = self._match(block_hashes, 0)
        nothing: list[list[Block]] = [[] for _ in longest]
        # If mapping the cached prefix needs too many mappings, open the sequence without it.
        for prefixes in (longest, nothing) if longest[0] else (nothing,):
            buffers = self._take_buffers(needed, prefixes)
            if buffers is None:
                continue
            progress = Progress()
            parts = tuple(
                CachedSequence(seq_id, buffer, block_hashes, needed, final_tokens, system, progress)
                for buffer in buffers
            )
            for group, part in zip(self._groups, parts, strict=True):
                group.allocator.add(part)
            if self._attach(parts, prefixes):
                self._open[seq_id] = OpenSequence(block_hashes, progress, parts)
                if self._states is not None:
                    checkpoints = planned_checkpoints(block_hashes, system_tokens, boundaries)
                    self._states.open(seq_id, parts[0], checkpoints, cached)
                return progress
            for group, part in zip(self._groups, parts, strict=True):
                group.allocator.remove(part)
                group.buffers.free(part.buffer)
            if self.wants_mapping_point:
                break  # sharing can succeed when no step is in flight
        return None

    def attach_cached(self, seq_id: int) -> int:
        """Map blocks that other sequences have sealed meanwhile. Return the number of the
        sequence's tokens with valid K and V."""
        sequence = self._open[seq_id]
        parts = sequence.parts
        if all(g.prefixes.can_share_next(p) for g, p in zip(self._groups, parts, strict=True)):
            start = len(parts[0].buffer.table)
            blocks, _ = self._match(sequence.block_hashes, start)
            if self._attach(parts, blocks) and self._states is not None:
                self._states.go_on(seq_id)
        return sequence.progress.computed

    def fork(self, seq_id: int, child_id: int) -> int:
        """Give a child sequence with the same prompt the parent's K and V, except those of the last
        token: share sealed blocks, copy the partial block. Return the number of the child's tokens
        with valid K and V. Do nothing if the parent's full blocks are not sealed yet."""
        parent, child = self._open[seq_id], self._open[child_id]
        num_tokens = child.block_hashes.num_tokens - 1
        whole, partial = divmod(num_tokens, self._layout.tokens_per_block)
        progress = child.progress
        if parent.progress.computed < num_tokens or self._states is not None:
            return progress.computed  # recurrent states are never copied to a child
        pairs = zip(self._groups, parent.parts, child.parts, strict=True)
        blocks = []
        for group, theirs, own in pairs:
            shared = group.blocks_to_fork(theirs, own, whole)
            if shared is None:
                return progress.computed
            blocks.append(shared)
        attached = self._attach(child.parts, blocks)
        if attached and partial and self.reserve(child_id, num_tokens):
            self._finish_mappings()
            for group, theirs, own in zip(self._groups, parent.parts, child.parts, strict=True):
                source, target = theirs.buffer.number, own.buffer.number
                group.backend.copy_block(source, whole, target, whole, partial)
            progress.restart_at(num_tokens)
        return progress.computed

    def add_pending_prefix(self, seq_id: int) -> None:
        """Let other sequences wait for the blocks that this sequence is going to compute."""
        ends = None if self._states is None else self._states.checkpoints(seq_id)
        self._first.prefixes.add_pending_prefix(self._open[seq_id].parts[0], ends)

    def pending_owner(self, seq_id: int) -> int | None:
        """Return the id of the sequence that will compute this sequence's next blocks, or None."""
        return self._first.prefixes.pending_owner(self._open[seq_id].parts[0])

    def explain(self, seq_id: int) -> tuple[int, MissReason | None]:
        """Return two things: the length of the longest cached prefix in tokens, and the reason that
        the sequence shares no more. The reason is None if all that it may share is cached."""
        parts = self._open[seq_id].parts
        reasons = [g.prefixes.explain(part) for g, part in zip(self._groups, parts, strict=True)]
        left_at, miss = min(reasons, key=lambda reason: reason[0])
        state = None if self._states is None else self._states.explain(parts[0])
        return left_at, state or miss

    # --- for the scheduler: growing and closing sequences -----------------------------------------

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Map memory for tokens [0, num_tokens). Return False and map nothing if memory is short or
        if mappings may not change now."""
        parts = self._open[seq_id].parts
        for part in parts:
            if num_tokens > part.mapped_tokens and not self._grow(parts, num_tokens):
                return False
        return self._states is None or self._states.reserve(seq_id, num_tokens)

    def _grow(self, parts: Sequence[CachedSequence], num_tokens: int) -> bool:
        """Map the missing blocks in all groups. Return False and map none if one group fails."""
        grown: list[tuple[GroupCache, CachedSequence, int]] = []
        for group, part in zip(self._groups, parts, strict=True):
            if num_tokens <= part.mapped_tokens:
                continue
            count = group.allocator.grow(part, num_tokens)
            if count is None:
                for other, other_part, mapped in grown:
                    other.allocator.shrink(other_part, mapped)
                return False
            grown.append((group, part, count))
        return True

    def commit(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Note that the K and V of the next ``len(token_ids)`` positions are valid."""
        sequence = self._open[seq_id]
        start = sequence.progress.computed
        end = start + len(token_ids)
        sequence.block_hashes.extend(token_ids, start)
        epoch = sequence.commit(end)
        if self._states is not None:
            self._states.commit(seq_id, epoch)
        size = self._layout.tokens_per_block
        for number in range(start // size, end // size):
            for group, part in zip(self._groups, sequence.parts, strict=True):
                group.prefixes.note_filled(epoch, part, number)

    def cancel_steps(self, seq_id: int) -> None:
        sequence = self._open[seq_id]
        sequence.cancel_steps()
        if self._states is not None:
            sequence.progress.restart_at(self._states.cancel_steps(seq_id))

    def close(self, seq_id: int, *, keep_prefix: bool = True) -> None:
        """Close a sequence. The sequence's blocks are kept until the newest step has completed.
        With ``keep_prefix``, other sequences may share the blocks that this sequence wrote."""
        parts = self._open.pop(seq_id).parts
        for part in parts:
            part.keeps_prefix = keep_prefix
        if self._states is not None:
            self._states.close(seq_id, self._issued_epoch)
        for group, part in zip(self._groups, parts, strict=True):
            group.close(part, self._issued_epoch)

    @property
    def wants_mapping_point(self) -> bool:
        """True if memory was refused only because mappings may not change while a step runs."""
        if self._maps_while_running:
            return False  # saves time in every step
        return any(group.allocator.wants_mapping_point for group in self._groups)

    @property
    def recovering(self) -> bool:
        """True if blocks or mappings of closed sequences will still become free."""
        if self._states is not None and self._states.recovering:
            return True
        return any(group.recovering for group in self._groups)

    # --- for the runner: the steps ----------------------------------------------------------------

    def views(self, plan: Sequence[tuple[int, int, int]]) -> KVViews:
        """Return the views of a step (access to K and V), and give the step an epoch (number).
        ``plan`` has ``(seq_id, start, count)`` of each sequence; sequences with one row come
        first."""
        segments: list[list[Segment]] = [[] for _ in self._groups]
        growing: list[tuple[GroupCache, CachedSequence, int, int]] = []
        epoch = self._issued_epoch + 1
        for seq_id, start, count in plan:
            sequence = self._open[seq_id]
            assert start == sequence.next_start, f"{seq_id}: {start} != {sequence.next_start}"
            sequence.schedule(end := start + count, epoch)
            for number, part in enumerate(sequence.parts):
                segments[number].append(Segment(part.buffer.number, start, count))
                if end + max(count, MAP_AHEAD_TOKENS) > part.table_tokens:
                    growing.append((self._groups[number], part, end, count))
        self._count_waits()
        if not self._maps_while_running:
            self._end_mapping_point(plan)
        # This may allocate slots, whose memory must be there before the rows are made.
        slots = [] if self._states is None else self._states.schedule(plan, epoch)
        rows = [g.backend.rows(own) for g, own in zip(self._groups, segments, strict=True)]
        states = None if self._state_memory is None else self._state_memory.rows(slots, rows[0])
        views = KVViews(self._layers, self._order, rows, segments[0], epoch, states)
        self._issued_epoch = epoch
        if self._maps_while_running:
            for group, part, end, count in growing:
                group.allocator.map_ahead(part, end, count)
        return views

    def _end_mapping_point(self, plan: Sequence[tuple[int, int, int]]) -> None:
        """Before a step, map blocks that sequences will need soon, and wait for all mappings."""
        if not self._first.allocator.is_at_mapping_point:
            return
        for seq_id, start, count in plan:
            for group, part in zip(self._groups, self._open[seq_id].parts, strict=True):
                group.allocator.top_up(part, start + count)
        self._finish_mappings()
        for group in self._groups:
            group.allocator.is_at_mapping_point = False

    def _finish_mappings(self) -> None:
        for group in self._groups:
            group.backend.finish_mappings()

    def step_completed(self, completed_epoch: int) -> None:
        """Note that all steps up to the epoch have completed; free the memory that waited for
        them."""
        assert completed_epoch <= self._issued_epoch
        before = self._completed_epoch
        self._completed_epoch = max(before, completed_epoch)
        is_quiet = self._completed_epoch == self._issued_epoch
        for group in self._groups:
            group.allocator.is_at_mapping_point = is_quiet
            group.allocator.wants_mapping_point &= not is_quiet
            closed = len(group.closed)
            group.advance(self._completed_epoch)
            # Release only after a step or an unmapping has completed. If each retry of a refused
            # mapping released memory again, the cache would seem to recover for ever.
            changed = (self._completed_epoch, len(group.closed)) != (before, closed)
            if changed and group.may_release:
                group.allocator.release_memory(self._limits.settings.free_slack_bytes)
        if self._states is not None:
            self._states.advance(self._completed_epoch)

    def release_idle_memory(self) -> None:
        """Release the memory of free state slots and of free blocks, except one heap. No sequence
        may be open."""
        if self._states is not None and self._state_memory is not None:
            self._states.advance(self._completed_epoch)
            self._state_memory.release([slot.number for slot in self._states.pool.clean()])
        for group in self._groups:
            group.advance(self._completed_epoch)
            group.allocator.release_memory(0)

    def evict_prefixes(self) -> None:
        """Evict some cached prefixes: few enough that no step is delayed."""
        for group in self._groups:
            group.prefixes.evict(BLOCKS_EVICTED_AT_ONCE)
        if self._states is not None:
            self._states.pool.evict()
        self._release_slack()

    def set_limit(self, limit_bytes: int) -> int:
        """Set the limit of used bytes. Return the limit in effect, which may be higher: the blocks
        in use, one full sequence, and the memory that cannot be released must each fit."""
        blocks = limit_bytes // sum(group.group.block_bytes for group in self._groups)
        allowed = 0
        for group in self._groups:
            allowed += group.allocator.set_limit(blocks) * group.group.block_bytes
        self._release_slack()
        return allowed

    def set_memory_pressure(self, *, short: bool) -> None:
        for group in self._groups:
            group.allocator.keeps_slack = not short
            group.allocator.spares_heaps = short and not self.releases_memory
        self._release_slack()

    def shut_down(self) -> bool:
        """Shut all backends down. No other call may follow. Return False if the device did not
        answer; the process must then end without releasing memory."""
        ended = [group.backend.shut_down() for group in self._groups]
        return all(ended)

    def backend_fault(self) -> BackendFailedError | None:
        """Return the failure of the memory's backend, or None. Any thread may call this."""
        try:
            for group in self._groups:
                group.backend.completed_ticket()
        except BackendFailedError as error:
            return error
        return None

    @property
    def copied_bytes(self) -> int:
        return sum(group.backend.copied_bytes for group in self._groups)

    @property
    def command_buffers(self) -> int:
        return max(group.backend.command_buffers for group in self._groups)

    def stats(self) -> KVStats:
        """Return the statistics of all groups together."""
        stats = total([group.stats(self._parts(n)) for n, group in enumerate(self._groups)])
        layout = self._layout.shape.slot
        if self._states is None or self._state_memory is None or layout is None:
            return stats
        pool = self._states.pool
        committed = self._state_memory.committed_bytes([slot.number for slot in pool.dirty_slots])
        slots = pool.stats(layout.slot_bytes, committed)
        return replace(stats, committed_bytes=stats.committed_bytes + committed, slots=slots)

    def memory_map(self) -> KVMap:
        slots = () if self._states is None else self._states.pool.slots
        return take_map(self._layout, self._first.pool, self._parts(0), slots)

    def check_invariants(self) -> None:
        for number, group in enumerate(self._groups):
            group.check_invariants(self._parts(number))
        if self._states is not None:
            self._states.check_invariants()

    def _release_slack(self) -> None:
        """Release free memory beyond the configured amount, if memory may be released now."""
        runs = self._open or self._completed_epoch < self._issued_epoch
        for group in self._groups:
            if group.may_release or not runs:
                group.allocator.release_memory(self._limits.settings.free_slack_bytes)

    def _parts(self, number: int) -> list[CachedSequence]:
        return [sequence.parts[number] for sequence in self._open.values()]

    def _match(self, hashes: BlockHashes, start: int) -> tuple[list[list[Block]], int]:
        """Return two things: the lists of sealed blocks with these hashes from block ``start`` on,
        one list per group and all equally long; and the index after the last match. With recurrent
        layers, the lists end earlier, at a block with kept states."""
        matches = [group.prefixes.match(hashes, start) for group in self._groups]
        count = longest = min(len(blocks) for blocks in matches)
        if self._states is not None:
            count = self._states.last_with_state(matches[0][:longest])
        return [blocks[:count] for blocks in matches], start + longest

    def _take_buffers(self, needed: int, prefixes: list[list[Block]]) -> list[SparseBuffer] | None:
        """Take a buffer for ``needed`` blocks in each group. Return None if any group has no
        buffer."""
        taken: list[SparseBuffer] = []
        for group, prefix in zip(self._groups, prefixes, strict=True):
            buffer = group.take_buffer(needed, prefix, alone=not self._open)
            if buffer is None:
                for other, free in zip(self._groups, taken, strict=False):
                    other.buffers.free(free)
                return None
            taken.append(buffer)
        return taken

    def _attach(self, parts: Sequence[CachedSequence], blocks: Sequence[list[Block]]) -> bool:
        """Map sealed blocks (a list per group). Return False and map none if one group fails."""
        for number, (group, part) in enumerate(zip(self._groups, parts, strict=True)):
            if not group.allocator.map_shared(part, blocks[number]):
                for other, mapped, shared in zip(
                    self._groups[:number], parts, blocks, strict=False
                ):
                    other.allocator.cut(mapped, len(shared))
                return False
        for group, part, shared in zip(self._groups, parts, blocks, strict=True):
            group.prefixes.note_attached(part, shared)
        return True

    def _count_waits(self) -> None:
        self.mapping_waits += any(group.allocator.has_waited for group in self._groups)
        for group in self._groups:
            group.allocator.has_waited = False
