"""Any order of opens, shares, forks, growth, closes, completions and refusals keeps the cache's
books right, and every sequence its own tokens."""

from array import array
from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.block_hashes import PrefixSalt
from kvcache.layout import KVLayout
from kvcache.records import BlockState
from kvcache.sequences import PromptBoundaries
from tests.kvcache.managers import (
    SHAPE,
    TOKENS,
    epochs_of,
    full_group,
    manager,
    paged,
    two_groups,
    windowed,
)
from tests.kvcache.maps import map_adds_up
from tests.kvcache.memory_faults import MemoryFaults
from tests.kvcache.strict_memory import Manners, StrictMemory

HEAP_BLOCKS = 4
MAX_TOKENS = 12 * TOKENS
# Few and alike: prompts are made of these.
PIECES = [[kind] * 12 for kind in range(3)]


class CacheMachine(RuleBasedStateMachine):
    """Drives a manager over memory whose calls fail and whose tickets lag, and whose slots hold
    token ids; the model is a list of token ids per sequence, and how many of them are computed."""

    @initialize(
        heaps=st.integers(1, 5),
        sequences=st.integers(1, 5),
        slack_blocks=st.integers(0, 6),
        manners=st.sampled_from(Manners),
        mapping_limit=st.one_of(st.none(), st.integers(4, 60)),
        max_sharers=st.integers(1, 6),
        shares_prefixes=st.sampled_from([True, True, False]),
        layout_of=st.sampled_from([paged, paged, two_groups, windowed]),
    )
    def start(
        self,
        heaps: int,
        sequences: int,
        slack_blocks: int,
        manners: Manners,
        mapping_limit: int | None,
        max_sharers: int,
        shares_prefixes: bool,
        layout_of: Callable[[int], KVLayout],
    ) -> None:
        self.layout = layout_of(MAX_TOKENS)
        self.faults = MemoryFaults()
        self.backends = [
            StrictMemory(
                group,
                at_once=False,
                holds_contents=True,
                faults=self.faults,
                **manners.fields,
                mapping_limit=mapping_limit,
                max_sharers=max_sharers,
            )
            for group in self.layout.groups
        ]
        self.kv = manager(
            self.layout,
            [*self.backends],
            budget_bytes=heaps * self.layout.heap_bytes,
            max_sequences=sequences,
            free_slack_bytes=slack_blocks * self.layout.groups[0].block_bytes,
            max_sharers=max_sharers,
            shares_prefixes=shares_prefixes,
        )
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.last_id = 0

    @invariant()
    def the_map_adds_up_to_the_figures(self) -> None:
        # What the system refuses to one group leaves the others, of which no map tells, ahead.
        if hasattr(self, "kv") and len(self.backends) == 1:
            map_adds_up(self.kv.memory_map(), self.kv.stats())

    @rule(
        pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12),
        own=st.integers(0, 3),
        system=st.integers(0, 40),
        salt=st.sampled_from([b"", b"", b"x"]),
    )
    def open(self, pieces: list[list[int]], own: int, system: int, salt: bytes) -> None:
        self.last_id += 1
        ids = [token for piece in pieces for token in piece] + [100 + self.last_id] * own
        hashes = self.kv.block_hashes(PrefixSalt(b"tenant", salt))
        hashes.extend(ids, 0)
        before = self.kv.stats()
        most = len(ids) + 30
        ends = PromptBoundaries(system)
        if self.kv.open(self.last_id, hashes, len(ids), final_tokens=most, boundaries=ends):
            self.tokens[self.last_id] = ids
            self.attach_into(self.last_id)
        else:
            assert self.kv.stats() == before

    def attach_into(self, seq: int) -> None:
        self.computed[seq] = self.kv.attach_cached(seq)
        assert self.computed[seq] < len(self.tokens[seq]), "the last token is always computed"

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.tokens)))
        before = self.computed[seq]
        if before < len(self.tokens[seq]):
            self.attach_into(seq)
        assert self.computed[seq] >= before

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A child of any sequence that has computed its prompt."""
        parent = data.draw(st.sampled_from(sorted(self.tokens)))
        self.last_id += 1
        ids = list(self.tokens[parent][: data.draw(st.integers(1, len(self.tokens[parent])))])
        hashes = self.kv.block_hashes(PrefixSalt(b"tenant", b"of forks"))
        hashes.extend(ids, 0)
        if self.kv.open(self.last_id, hashes, len(ids), final_tokens=len(ids)):
            self.tokens[self.last_id] = ids
            copied = self.kv.copied_bytes
            self.computed[self.last_id] = self.kv.fork(parent, self.last_id)
            assert self.kv.copied_bytes - copied < self.layout.block_bytes
            assert self.computed[self.last_id] < len(ids)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def grow_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True))
        plan = []
        for seq in chosen:
            self.kv.add_pending_prefix(seq)
            count = data.draw(st.integers(1, 40))
            if self.kv.reserve(seq, self.computed[seq] + count):
                plan.append((seq, self.computed[seq], count))
        if not plan:
            return
        epoch = self.kv.views(plan).epoch
        for seq, start, count in plan:
            ids = self.tokens[seq]
            ids += [data.draw(st.integers(0, 2))] * (start + count - len(ids))
            written = array("Q", ids[start : start + count])
            for number, backend in enumerate(self.backends):
                buffer = full_group(self.kv, number)._open[seq].buffer.number
                backend.write(buffer, start, written, epoch, owner=None)
            self.kv.commit(seq, ids[start : start + count])
            self.computed[seq] += count

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), keep=st.booleans())
    def close(self, data: st.DataObject, keep: bool) -> None:
        seq = data.draw(st.sampled_from(sorted(self.tokens)))
        self.kv.close(seq, keep_prefix=keep)
        del self.tokens[seq], self.computed[seq]

    @rule(lag=st.integers(0, 3))
    def complete_steps(self, lag: int) -> None:
        issued, completed = epochs_of(self.kv)
        for backend in self.backends:
            backend.completed_epoch = max(completed, issued - lag)
        self.kv.step_completed(max(completed, issued - lag))

    @rule()
    def complete_memory_operations(self) -> None:
        for backend in self.backends:
            backend.complete()

    @rule(calls=st.integers(1, 3))
    def refuse_a_call_soon(self, calls: int) -> None:
        self.faults.fail_at = self.faults.calls + calls

    @rule()
    def idle(self) -> None:
        self.kv.release_idle_memory()

    @rule()
    def evict_prefixes(self) -> None:
        self.kv.evict_prefixes()

    @invariant()
    def the_books_are_right(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_invariants()

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for seq, computed in getattr(self, "computed", {}).items():
            for number, backend in enumerate(self.backends):
                buffer = full_group(self.kv, number)._open[seq].buffer.number
                read = b"".join(held for _, held in backend.read(buffer, computed, computed))
                held = [*array("Q", read)]
                assert held == self.tokens[seq][computed - len(held) : computed]

    def teardown(self) -> None:
        """When all have left and everything is done, nothing is mapped, waits or leaks."""
        if not hasattr(self, "kv"):
            return
        for seq in list(self.tokens):
            self.kv.close(seq)
        for _ in range(3):
            self.complete_steps(lag=0)
            self.complete_memory_operations()
        self.kv.evict_prefixes()
        for _ in range(2):
            self.kv.release_idle_memory()
            self.complete_memory_operations()
        self.kv.release_idle_memory()
        self.kv.check_invariants()
        stats = self.kv.stats()
        assert all(backend.mapped == {} for backend in self.backends)
        assert stats.free_bytes == stats.capacity_bytes
        pools = [full_group(self.kv, number).pool for number in range(len(self.backends))]
        assert all(pool.count(BlockState.RELEASING) == 0 for pool in pools)
        if not self.backends[0].releases.keeps_heaps:
            assert stats.committed_bytes <= self.layout.heap_bytes


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestCache = CacheMachine.TestCase


def test_the_shape_makes_blocks_of_that_many_tokens() -> None:
    assert paged(MAX_TOKENS).tokens_per_block == two_groups(MAX_TOKENS).tokens_per_block == TOKENS
    assert [group.page_bytes for group in two_groups().groups] == [4096, 8192]
    assert SHAPE.bytes_per_token * TOKENS == paged().groups[0].block_bytes
