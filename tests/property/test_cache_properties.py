"""Any order of opens, growth, closes, completions and refusals keeps the cache's books right."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import metal_ext
from kvcache.heap_pool import BlockState
from kvcache.layout import KVShape, paged_layout
from kvcache.manager import KVCacheManager
from tests.kvcache.fakes import FakeBackend

SHAPE = KVShape(num_layers=1, kv_heads=1, head_dim=64, itemsize=4)
HEAP_BLOCKS = 3
MAX_TOKENS = 12 * 16


class CacheMachine(RuleBasedStateMachine):
    """Drives a manager over a fake backend whose calls fail and whose tickets lag."""

    @initialize(
        heaps=st.integers(1, 5),
        sequences=st.integers(1, 4),
        slack_blocks=st.integers(0, 6),
        releases_blocks=st.booleans(),
        mapping_limit=st.one_of(st.none(), st.integers(4, 40)),
    )
    def start(
        self,
        heaps: int,
        sequences: int,
        slack_blocks: int,
        releases_blocks: bool,
        mapping_limit: int | None,
    ) -> None:
        layout = paged_layout(
            SHAPE,
            max_tokens=MAX_TOKENS,
            heap_bytes=HEAP_BLOCKS * 8192,
            system_page_bytes=4096,
            page_bytes=4096,
        )
        self.backend = FakeBackend(
            layout.group,
            at_once=False,
            releases_blocks=releases_blocks,
            mapping_limit=mapping_limit,
        )
        self.kv = KVCacheManager(
            layout,
            self.backend,
            budget_bytes=heaps * layout.group.heap_bytes,
            max_sequences=sequences,
            free_slack_bytes=slack_blocks * layout.group.block_bytes,
            workers=metal_ext.CpuWorkers(1),
        )
        self.group = layout.group
        self.lengths: dict[int, int] = {}
        self.last_id = 0

    @rule(tokens=st.integers(1, MAX_TOKENS + 5))
    def open(self, tokens: int) -> None:
        self.last_id += 1
        before = self.kv.stats()
        if self.kv.open(self.last_id, tokens):
            self.lengths[self.last_id] = 0
        else:
            assert self.kv.stats() == before

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def grow_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), unique=True))
        plan = []
        for seq in chosen:
            count = data.draw(st.integers(1, 40))
            mapped = dict(self.backend.mapped)
            if self.kv.reserve(seq, self.lengths[seq] + count):
                plan.append((seq, self.lengths[seq], count))
            else:
                assert self.backend.mapped == mapped
        if not plan:
            return
        self.kv.views(plan)
        for seq, _, count in plan:
            self.kv.commit(seq, [0] * count)
            self.lengths[seq] += count

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.lengths)))
        self.kv.close(seq)
        del self.lengths[seq]

    @rule(lag=st.integers(0, 3))
    def complete_steps(self, lag: int) -> None:
        issued, completed = self.kv.epochs
        self.kv.step_completed(max(completed, issued - lag))

    @rule()
    def complete_memory_operations(self) -> None:
        self.backend.complete()

    @rule()
    def refuse_a_call_soon(self) -> None:
        self.backend.fail_at = self.backend.calls + 2

    @rule()
    def idle(self) -> None:
        self.kv.idle()

    @invariant()
    def the_books_are_right(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_invariants()

    @invariant()
    def every_sequence_has_memory_for_its_tokens(self) -> None:
        for length in getattr(self, "lengths", {}).values():
            assert length <= MAX_TOKENS

    def teardown(self) -> None:
        """When all have left and everything is done, nothing is mapped, waits or leaks."""
        if not hasattr(self, "kv"):
            return
        for seq in list(self.lengths):
            self.kv.close(seq)
        for _ in range(3):
            self.kv.step_completed(self.kv.epochs[0])
            self.backend.complete()
        self.kv.idle()
        self.backend.complete()
        self.kv.idle()
        self.kv.check_invariants()
        stats = self.kv.stats()
        assert self.backend.mapped == {}
        assert stats.live_bytes == stats.quarantined_bytes == stats.mapped_ahead_bytes == 0
        assert self.kv._pool.count(BlockState.RETURNING) == 0
        if self.backend.releases_blocks:
            assert stats.committed_bytes <= self.group.heap_bytes


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
TestCache = CacheMachine.TestCase
