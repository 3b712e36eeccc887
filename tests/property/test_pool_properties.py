"""Heap pool and prefix index against models of plain sets."""

from operator import attrgetter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.backend import Releases
from kvcache.block import Block, BlockState
from kvcache.block_hashes import BlockHashes, PrefixSalt
from kvcache.evictor import UseClock
from kvcache.heap_pool import HeapPool
from kvcache.prefix_index import PrefixIndex
from tests.kvcache.managers import paged
from tests.kvcache.strict_memory import Manners, StrictMemory

HEAPS = 4
in_order = attrgetter("heap", "place")


class PoolMachine(RuleBasedStateMachine):
    """The model: for every block in use, how many sequences and how many buffers have it."""

    @initialize(manners=st.sampled_from(Manners), at_once=st.booleans())
    def start(self, manners: Manners, at_once: bool) -> None:
        self.group = paged().groups[0]
        self.backend = StrictMemory(self.group, at_once=at_once, **manners.fields)
        self.pool = HeapPool(self.group, self.backend, HEAPS * self.group.heap_bytes)
        self.sequences: dict[Block, int] = {}
        self.buffers: dict[Block, int] = {}
        self.sealed: set[Block] = set()
        self.cached: set[Block] = set()
        self.last: Block | None = None

    @rule(count=st.integers(1, 6))
    def allocate(self, count: int) -> None:
        available = self.pool.free_blocks
        blocks = self.pool.allocate(count, self.last)
        assert (blocks is None) == (count > available)
        for block in blocks or []:
            assert block not in self.buffers, "handed out twice"
            assert block not in self.cached
            self.sequences[block] = self.buffers[block] = 1
            self.last = block

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.sequences, key=in_order)))
        if block not in self.sealed:
            self.pool.seal(block)
            self.sealed.add(block)

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.sealed, key=in_order)))
        self.pool.attach(block)
        self.cached.discard(block)
        self.sequences[block] = self.sequences.get(block, 0) + 1
        self.buffers[block] = self.buffers.get(block, 0) + 1

    @precondition(lambda self: any(self.sequences.values()))
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        held = sorted((b for b, count in self.sequences.items() if count), key=in_order)
        block = data.draw(st.sampled_from(held))
        self.pool.detach([block])
        self.sequences[block] -= 1

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), keep=st.booleans())
    def unmap(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from(self.waiting()))
        self.buffers[block] -= 1
        assert self.pool.remove_buffer(block) == (self.buffers[block] == 0)
        if self.buffers[block]:
            return
        del self.buffers[block], self.sequences[block]
        if keep and block in self.sealed:
            self.pool.cache(block)
            self.cached.add(block)
        else:
            self.pool.free(block)
            self.sealed.discard(block)

    def waiting(self) -> list[Block]:
        """Blocks with more buffers than sequences."""
        more = (b for b, count in self.buffers.items() if count > self.sequences[b])
        return sorted(more, key=in_order)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.cached, key=in_order)))
        self.pool.free(block)
        self.cached.remove(block)
        self.sealed.remove(block)

    @rule(blocks=st.integers(0, 16))
    def limit(self, blocks: int) -> None:
        used, allowed = self.pool.used_blocks, self.pool.set_limit(blocks)
        assert allowed >= used
        releasing = self.pool.count(BlockState.RELEASING)
        assert self.pool.capacity_blocks <= allowed + releasing
        if self.backend.releases is Releases.BLOCKS:
            assert allowed <= max(used, blocks)

    @rule(slack_blocks=st.integers(0, 8))
    def trim(self, slack_blocks: int) -> None:
        self.pool.release_memory(slack_blocks * self.group.block_bytes, self.pool.free_blocks)
        self.backend.complete()
        self.pool.poll(self.backend.completed)
        if self.backend.releases is Releases.BLOCKS:
            assert self.pool.free_committed_bytes <= slack_blocks * self.group.block_bytes

    @invariant()
    def the_pool_agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        for block in self.pool.blocks():
            assert block.buffers == self.buffers.get(block, 0)
            assert block.sequences == self.sequences.get(block, 0)
        assert self.pool.count(BlockState.CACHED) == len(self.cached)
        taken = len(self.buffers) + len(self.cached) + self.pool.count(BlockState.RELEASING)
        assert self.pool.free_blocks == self.pool.capacity_blocks - taken


class IndexMachine(RuleBasedStateMachine):
    """The model: the pasts that are kept, their users, and their last use."""

    @initialize()
    def start(self) -> None:
        self.clock = UseClock()
        self.index = PrefixIndex(self.clock)
        self.kept: dict[tuple[int, ...], Block] = {}
        self.users: dict[tuple[int, ...], int] = {}
        self.open: list[list[tuple[int, ...]]] = []
        self.blocks = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8), system=st.integers(0, 3))
    def keep(self, tokens: list[int], system: int) -> None:
        hashes = BlockHashes(b"", PrefixSalt(), 2)
        hashes.extend(tokens, 0)
        pasts = [tuple(tokens[: 2 * n + 2]) for n in range(len(hashes.digests))]
        for number, past in enumerate(pasts):
            found = self.index.find(hashes, number)
            assert found is self.kept.get(past)
            if found is None:
                self.blocks += 1
                self.kept[past] = Block(0, self.blocks, BlockState.SEALED)
                self.index.insert(hashes, number, self.kept[past], number < system)
                self.users[past] = 0
            else:
                self.index.use(found, number < system)
                found.state = BlockState.SEALED
            self.users[past] += 1
        matched = len(pasts)
        left_at, reason = self.index.explain(hashes, matched)
        assert (left_at >= 2 * matched, reason) == (True, None)
        self.open.append(pasts)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        pasts = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.clock.tick()
        for past in pasts:
            if past in self.users:
                self.users[past] -= 1
                if not self.users[past]:
                    self.kept[past].state = BlockState.CACHED
                    self.index.note_cached(self.kept[past])

    @rule()
    def evict(self) -> None:
        idle = {past for past, users in self.users.items() if not users}
        block = self.index.evict()
        assert (block is None) == (not idle)
        if block is not None:
            (past,) = [p for p in idle if self.kept[p] == block]
            assert not any(p[:-2] == past for p in self.kept), "not a leaf"
            del self.kept[past], self.users[past]

    @invariant()
    def the_index_agrees_with_the_model(self) -> None:
        if hasattr(self, "index"):
            self.index.check_invariants()
            assert len(self.index) == len(self.kept)
            assert all(block.prefix is not None for block in self.kept.values())


for machine in (PoolMachine, IndexMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPool = PoolMachine.TestCase
TestIndex = IndexMachine.TestCase
