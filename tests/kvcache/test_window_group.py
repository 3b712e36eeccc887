"""Sequences of a model with windows: the blocks that a window keeps, and the prefix hits."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from kvcache import evictor
from kvcache.backends.backend import Releases
from kvcache.block_hashes import PrefixSalt
from kvcache.budget import CacheLimits
from kvcache.config import CacheSettings
from kvcache.groups.base import evict_cheapest
from kvcache.groups.full import FullGroup
from kvcache.layout import KVFormat, KVShape, KVSpec, paged_layout
from kvcache.manager import KVCacheManager
from kvcache.slots import SLOTS_PER_SEQUENCE
from kvcache.stats import MissReason
from tests.kvcache.managers import TOKENS, full_group, join
from tests.kvcache.memory_faults import MemoryFaults
from tests.kvcache.strict_memory import StrictMemory
from tests.kvcache.strict_states import STATES, StrictStates

WINDOW = 24
FULL = KVSpec(1, 64, KVFormat.FLOAT32)
WINDOWED = replace(FULL, window=WINDOW)
# On a GPU, mappings change while no step runs.
POINTS = {"maps_while_running": False, "releases": Releases.NOTHING}
PROMPT = list(range(1000, 1000 + 10 * TOKENS))
OTHER = PrefixSalt(b"other")


@dataclass
class Stage:
    """A cache, and a device that is done with a step at once. The windows are in the last group."""

    has_rings: ClassVar[bool] = False
    """Whether sequences have as few addresses as there can be behind windows."""
    layers: tuple[KVSpec, ...] = (FULL, WINDOWED)
    heaps: int = 20
    chunk: int = 64
    num_slots: int = 0
    shares_prefixes: bool = True
    memory: dict[str, Any] = field(default_factory=dict)
    """Fields of the memories."""
    kv: KVCacheManager = field(init=False)
    memories: list[StrictMemory] = field(init=False)
    newest: int = 0

    def __post_init__(self) -> None:
        shape = KVShape(self.layers, STATES if self.num_slots else ())
        heap_bytes = 4 * TOKENS * shape.bytes_per_token
        layout = paged_layout(
            shape, max_tokens=640, heap_bytes=heap_bytes, system_page_bytes=4096, page_bytes=4096
        )
        if self.has_rings:
            groups = (g.with_ring(self.chunk) if g.window else g for g in layout.groups)
            layout = replace(layout, groups=tuple(groups))
        self.memories = [
            StrictMemory(group, holds_contents=True, **self.memory) for group in layout.groups
        ]
        settings = CacheSettings(free_slack_bytes=0, prefix_cache=self.shares_prefixes)
        limits = CacheLimits(self.heaps * heap_bytes, 8, 16, settings, self.chunk)
        states = StrictStates(self.num_slots) if self.num_slots else None
        memories = [*self.memories]
        self.kv = KVCacheManager(layout, memories, limits, identity=b"test", states=states)

    @property
    def windows(self) -> StrictMemory:
        return self.memories[-1]

    @property
    def group(self) -> FullGroup:
        """The group of layers with the windows."""
        return full_group(self.kv, len(self.memories) - 1)

    def open(self, ids: Sequence[int], *, final: int = 640, **where: Any) -> int | None:
        """Opens a sequence; its number, or None."""
        self.newest += 1
        is_open = join(self.kv, self.newest, ids, final=final, **where)
        self.kv.check_invariants()
        return self.newest if is_open else None

    def step(self, seq_id: int, ids: Sequence[int], end: int) -> None:
        """A step that computes a sequence's tokens up to ``end``."""
        start = self.kv._open[seq_id].next_start
        assert self.kv.reserve(seq_id, end)
        views = self.kv.views([(seq_id, start, end - start)])
        segments: Any = views.rows
        for memory, (segment,) in zip(self.memories, segments, strict=True):
            part = array("Q", ids[start:end])
            memory.write(segment.buffer, start, part, views.epoch, None, seq_id)
            held = b"".join(part for _, part in memory.read(segment.buffer, end, start))
            assert held == array("Q", ids[:end]).tobytes()[-len(held) :]
        self.kv.commit(seq_id, list(ids[start:end]))
        self.kv.check_invariants()

    def compute(self, seq_id: int, ids: Sequence[int], end: int | None = None) -> None:
        """Computes all that is left, in chunks."""
        end = len(ids) if end is None else end
        while (start := self.kv._open[seq_id].progress.computed) < end:
            self.step(seq_id, ids, min(end, start + self.chunk))
            self.done()

    def done(self) -> None:
        """All steps complete, and all operations."""
        for _ in range(2):
            for memory in self.memories:
                memory.complete()
                memory.completed_epoch = self.kv._issued_epoch
            self.kv.step_completed(self.kv._issued_epoch)
            self.kv.check_invariants()

    def live(self, ids: Sequence[int], **where: Any) -> int:
        """A whole life: how many of its tokens came from the cache."""
        seq_id = opened(self, ids, **where)
        found = self.kv.attach_cached(seq_id)
        self.compute(seq_id, ids)
        self.kv.close(seq_id)
        self.done()
        return found

    def places(self, seq_id: int) -> list[int]:
        """The places of a sequence's mapped blocks in the windows, but for those without tokens."""
        own = self.group._open[seq_id]
        end = -(-own.sequence.next_start // TOKENS)
        mapped = {place for buffer, place in self.windows.mapped if buffer == own.buffer.number}
        return sorted(place for place in mapped if place < end)

    def evict(self, blocks: int) -> None:
        """Evicts some blocks of windows."""
        assert self.group.prefixes.evict(blocks) == blocks


@pytest.fixture(autouse=True, params=[False, True], ids=["line", "ring"])
def addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "has_rings", request.param)


def opened(stage: Stage, ids: Sequence[int] = PROMPT, **where: Any) -> int:
    seq_id = stage.open(ids, **where)
    assert seq_id is not None
    return seq_id


@pytest.mark.parametrize(
    ("window", "tokens", "places"),
    [
        *((24, 32, [0, 1]), (24, 39, [0, 1, 2]), (24, 48, [1, 2]), (24, 160, [8, 9])),
        *((33, 48, [1, 2]), (34, 48, [0, 1, 2]), (1, 47, [1, 2]), (1, 48, [2])),
    ],
)
def test_blocks_that_no_later_token_sees_are_unmapped(
    window: int, tokens: int, places: list[int]
) -> None:
    stage = Stage((FULL, replace(FULL, window=window)), chunk=1000)
    seq_id = opened(stage)
    for end in range(1, tokens + 1):
        stage.step(seq_id, PROMPT, end)
        stage.done()
    assert stage.places(seq_id) == places


def test_a_block_stays_while_a_step_that_sees_it_runs() -> None:
    stage = Stage()
    seq_id = opened(stage)
    stage.compute(seq_id, PROMPT, 48)
    for end in (64, 80, 96):
        stage.step(seq_id, PROMPT, end)
    assert stage.places(seq_id) == [1, 2, 3, 4, 5]
    assert stage.kv.recovering
    stage.windows.completed_epoch = stage.kv._issued_epoch - 1
    stage.kv.step_completed(stage.kv._issued_epoch - 1)
    # Those that stay would have other addresses in a ring, where a step may have written them.
    assert stage.places(seq_id) == ([1, 2, 3, 4, 5] if stage.has_rings else [3, 4, 5])
    stage.done()
    assert stage.places(seq_id) == [4, 5]
    assert not stage.kv.recovering


def test_the_next_turn_maps_the_last_window_alone_even_if_a_chunk_was_longer() -> None:
    stage = Stage(chunk=96)
    assert stage.live(PROMPT) == 0
    seq_id = opened(stage, PROMPT + PROMPT[:20])
    assert stage.kv.attach_cached(seq_id) == 160
    assert stage.places(seq_id) == [8, 9]
    shown = stage.kv.memory_map().groups[1]
    (mapped,) = shown.sequences
    assert shown.geometry["window"] == WINDOW
    assert (mapped.seq_id, mapped.first_block, mapped.sealed_blocks) == (seq_id, 8, 2)
    stage.compute(seq_id, PROMPT + PROMPT[:20])


def test_the_middle_is_evicted_before_the_last_window_and_that_of_the_system_prompt() -> None:
    stage = Stage()
    stage.live(PROMPT, system=80)
    assert stage.live(PROMPT[:120] + [7] * 20, system=80) == 112
    while stage.group.cheapest() == 0:
        stage.evict(1)
    assert stage.live(PROMPT[:64] + [8] * 20) == 0
    assert stage.live(PROMPT[:80] + [9] * 20) == 80
    assert stage.live([*PROMPT, 7]) == 160


def test_a_miss_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.live(PROMPT)
    seq_id = opened(stage, [*PROMPT, 7])
    assert stage.kv.explain(seq_id) == (160, None)
    stage.kv.close(seq_id)
    other = opened(stage, PROMPT[:32] + [7] * 40)
    assert stage.kv.explain(other) == (32, MissReason.NEVER_CACHED)
    stage.kv.close(other)
    stage.done()
    monkeypatch.setattr(evictor, "REMEMBERED_EVICTIONS", 0)
    stage.evict(10)
    assert stage.kv.explain(opened(stage, [*PROMPT, 7])) == (0, MissReason.NO_WINDOW)


def test_without_a_prefix_cache_blocks_behind_the_window_are_free_at_once() -> None:
    stage = Stage((WINDOWED,), shares_prefixes=False)
    seq_id = opened(stage)
    stage.compute(seq_id, PROMPT)
    stats = stage.kv.stats()
    assert stats.cached_bytes == 0
    assert stats.live_bytes == 2 * stats.block_bytes
    stage.kv.close(seq_id)
    stage.done()
    assert stage.kv.explain(opened(stage, [*PROMPT, 7])) == (0, None)


def test_a_prompt_takes_as_much_memory_as_its_window_and_a_chunk() -> None:
    stage = Stage((WINDOWED,), heaps=5, chunk=32)
    ids = list(range(600))
    first, second = (opened(stage, [n, *ids]) for n in (1, 2))
    assert stage.open([3, *ids]) is not None
    assert stage.open([4, *ids]) is None, "20 blocks are there, and 6 are set aside for each"
    for seq_id, n in ((first, 1), (second, 2)):
        stage.compute(seq_id, [n, *ids])
    assert stage.kv.max_tokens == 640
    assert Stage((WINDOWED,), heaps=1).kv.max_tokens == 64, "a window and a chunk do not fit"


def test_others_take_the_window_of_a_prompt_and_leave_their_own() -> None:
    stage = Stage()
    stage.live(PROMPT[:48])
    ids = PROMPT[:155]
    parent, child, other = (opened(stage, prompt) for prompt in (ids, ids, [*ids, 7]))
    assert stage.places(child) == [1, 2], "the end of the cached prefix"
    stage.kv.add_pending_prefix(parent)
    assert stage.kv.pending_owner(other) == parent
    stage.compute(parent, ids)
    assert stage.kv.fork(parent, child) == 154, "a second answer"
    assert stage.kv.attach_cached(other) == 144, "a prompt that waited"
    stage.done()
    assert stage.places(child) == [7, 8, 9]
    assert stage.places(other) == [7, 8]
    assert [memory.copies for memory in stage.memories] == [1, 1]
    stage.compute(child, ids)
    stage.compute(other, [*ids, 7])


def test_a_parent_that_has_left_the_prompt_behind_has_no_window_for_a_child() -> None:
    stage = Stage(shares_prefixes=False)
    parent, child = opened(stage), opened(stage)
    stage.compute(parent, PROMPT + PROMPT)
    assert stage.kv.fork(parent, child) == 0
    assert not stage.kv.recovering


@pytest.mark.parametrize("fail_at", range(1, 10))
@pytest.mark.parametrize(("cached", "end"), [(48, 160), (0, 32)])
def test_fault_04_what_the_system_refuses_after_a_jump_leaves_all_as_it_was(
    cached: int, end: int, fail_at: int
) -> None:
    faults = MemoryFaults()
    layers = FULL, WINDOWED, replace(WINDOWED, head_dim=128)
    stage = Stage(layers, memory={"faults": faults})
    stage.live(PROMPT[:cached] or [8])
    ids = [*PROMPT[:end], 7]
    first, second = opened(stage, PROMPT[:end]), opened(stage, ids)
    stage.compute(first, PROMPT[:end])
    faults.fail_at = faults.calls + fail_at
    before = [dict(memory.mapped) for memory in stage.memories]
    if stage.kv.attach_cached(second) == cached:
        assert [dict(memory.mapped) for memory in stage.memories] == before
    else:
        assert faults.refused == 0
    faults.fail_at = 0
    stage.kv.check_invariants()
    assert stage.kv.attach_cached(second) == end
    stage.compute(second, ids)


@pytest.mark.parametrize("layers", [(WINDOWED,), (FULL, WINDOWED)])
def test_a_failed_sequence_leaves_no_window_to_go_on_from_and_takes_no_other(
    layers: tuple[KVSpec, ...],
) -> None:
    stage = Stage(layers)
    system = {"system": 48}
    stage.live(PROMPT[:48], **system)
    assert stage.live(PROMPT, salt=OTHER) == 0, "clients share nothing"
    beside = PROMPT[:100] + [8] * 60
    assert stage.live(beside, **system) == 48
    failed, running = (opened(stage, ids, **system) for ids in (PROMPT, [*PROMPT, 7]))
    stage.compute(failed, PROMPT)
    assert stage.kv.attach_cached(running) == 160
    longer = [*PROMPT, 7, *PROMPT]
    stage.compute(running, longer)
    while stage.group.cheapest() == 0:
        stage.evict(1)
    stage.kv.close(failed, keep_prefix=False)
    stage.kv.close(running)
    stage.done()
    assert stage.live(longer, **system) == 48, "nothing of it, and nothing that followed it"
    assert stage.live([*beside, 7]) == 160
    assert stage.live([*PROMPT, 7], salt=OTHER) == 160


def test_blocks_that_a_running_sequence_shares_are_not_promised_to_another() -> None:
    stage = Stage((WINDOWED,), heaps=3, chunk=16)
    stage.live(PROMPT)
    ends = [PROMPT + [n] * 40 for n in (1, 2)]
    first, second = (opened(stage, ids) for ids in ends)
    stage.compute(first, ends[0])
    stage.compute(second, ends[1])
    assert stage.places(second) == [10, 11, 12]


def test_at_mapping_points_alone_blocks_leave_and_sequences_jump() -> None:
    stage = Stage(memory=POINTS, chunk=160)
    seq_id = opened(stage)
    stage.step(seq_id, PROMPT, 80)
    stage.step(seq_id, PROMPT, 96)
    stage.kv.step_completed(1)
    before = stage.places(seq_id)
    assert before[:5] == [0, 1, 2, 3, 4]
    stage.done()
    assert stage.places(seq_id)[:2] == [4, 5]
    other = opened(stage, PROMPT[:90])
    stage.step(seq_id, PROMPT, 97)
    assert stage.kv.attach_cached(other) == 80, "what it needs was mapped when it was opened"
    assert stage.open(PROMPT[:90]) is None
    assert stage.kv.wants_mapping_point
    stage.kv.close(other)
    stage.done()
    stage.step(seq_id, PROMPT, 98)
    stage.step(seq_id, PROMPT, 99)
    stage.kv.close(seq_id)
    for memory in stage.memories:
        memory.completed_epoch = stage.kv._issued_epoch - 1
    stage.kv.step_completed(stage.kv._issued_epoch - 1)
    stage.kv.check_invariants()
    stage.done()
    assert not stage.kv.recovering
    assert stage.live([*PROMPT[:97], 7]) == 96


def test_a_sequence_does_not_begin_at_a_window_while_a_step_runs() -> None:
    stage = Stage((WINDOWED,), memory=POINTS)
    stage.live(PROMPT)
    running = opened(stage, [7])
    stage.step(running, [7], 1)
    assert stage.open([*PROMPT, 7]) is None
    assert stage.kv.wants_mapping_point
    stage.done()
    assert stage.live([*PROMPT, 7]) == 160


def test_cached_blocks_that_are_promised_to_others_are_not_attached() -> None:
    stage = Stage((replace(WINDOWED, window=72),), heaps=4, chunk=16)
    stage.live(PROMPT[:96])
    second, first = opened(stage, [*PROMPT, 7]), opened(stage)
    stage.compute(first, PROMPT)
    stage.kv.close(first)
    stage.done()
    third = opened(stage, [8] * 160)
    assert stage.kv.attach_cached(second) == 96
    stage.kv.close(third)
    assert stage.kv.attach_cached(second) == 160
    stage.kv.check_invariants()


def test_memory_that_only_a_mapping_point_frees_is_asked_for() -> None:
    stage = Stage((WINDOWED,), heaps=2, memory=POINTS, chunk=48)
    seq_id = opened(stage)
    stage.step(seq_id, PROMPT, 48)
    stage.step(seq_id, PROMPT, 96)
    assert not stage.kv.reserve(seq_id, 160)
    assert not stage.kv.wants_mapping_point
    stage.windows.completed_epoch = 1
    stage.kv.step_completed(1)
    assert not stage.kv.reserve(seq_id, 160)
    assert stage.kv.wants_mapping_point
    stage.done()
    stage.compute(seq_id, PROMPT)


def test_states_need_no_layer_without_a_window() -> None:
    stage = Stage((WINDOWED,), num_slots=3 * SLOTS_PER_SEQUENCE)
    ids = [*PROMPT, 7]
    stage.live(PROMPT)
    again = opened(stage, ids)
    assert stage.kv.attach_cached(again) == 160
    stage.kv.close(again)
    stage.done()
    stage.evict(10)
    assert stage.kv.attach_cached(opened(stage, ids)) == 0
    stage.kv.check_invariants()


def test_under_pressure_middles_go_first_and_a_window_without_a_block_is_of_no_use() -> None:
    stage = Stage()
    stage.live(PROMPT)
    assert stage.group.cheapest() == 0
    stage.evict(8)
    assert stage.group.cheapest() > 4 * full_group(stage.kv, 0).cheapest(), "it saves all before it"
    stage.evict(1)
    seq_id = opened(stage, [*PROMPT, 7])
    assert stage.kv.attach_cached(seq_id) == 0
    assert stage.kv.explain(seq_id) == (0, MissReason.WINDOW_EVICTED)
    stage.kv.close(seq_id)
    stage.done()
    evict_cheapest(stage.kv._groups)
    assert stage.kv.stats().cached_bytes == 0
