"""Sequences of a model with recurrent layers: what is kept of their states, and what is found."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import mlx.core as mx
import pytest

from kvcache import evictor
from kvcache.block_hashes import PrefixSalt
from kvcache.budget import CacheLimits
from kvcache.config import CacheSettings
from kvcache.groups.state import WAYPOINT_TOKENS
from kvcache.inspector import SealedSlot
from kvcache.manager import KVCacheManager
from kvcache.sequences import PromptBoundaries
from kvcache.slots import Retention, SlotPool
from kvcache.stats import MissReason
from kvcache.views import KVViews, OrderingHandles
from tests.kvcache.managers import BLOCK, TOKENS, paged, settle, state_group
from tests.kvcache.strict_memory import StrictMemory
from tests.kvcache.strict_states import STATES, StrictStates

SLOT_BYTES = 16384
SYSTEM = list(range(1000, 1000 + 2 * TOKENS))
QUESTION = list(range(2000, 2000 + TOKENS + 5))


@dataclass
class Stage:
    """A cache with some slots, and a device that is done with a step at once."""

    num_slots: int = 12
    max_tokens: int = 320
    kv: KVCacheManager = field(init=False)
    memory: StrictMemory = field(init=False)
    states: StrictStates = field(init=False)
    newest: int = 0
    computed: list[int] = field(default_factory=list)
    """The number of tokens that each sequence had to compute."""

    def __post_init__(self) -> None:
        layout = paged(self.max_tokens)
        shape = replace(layout.shape, states=STATES)
        layout = replace(layout, shape=shape)
        group = layout.groups[0]
        self.states = StrictStates(self.num_slots)
        budget = 4 * self.max_tokens * group.bytes_per_token
        limits = CacheLimits(budget, 8, 16, CacheSettings(free_slack_bytes=0))
        self.memory = StrictMemory(group)
        self.kv = KVCacheManager(
            layout, [self.memory], limits, identity=b"test", states=self.states
        )

    @property
    def pool(self) -> SlotPool:
        return state_group(self.kv).pool

    def open(self, ids: list[int], *, system: int = 0, turns: tuple[int, int] = (0, 0)) -> int:
        """Opens a sequence; its number."""
        self.newest += 1
        hashes = self.kv.block_hashes(PrefixSalt())
        hashes.extend(ids, 0)
        opened = self.kv.open(
            self.newest,
            hashes,
            len(ids),
            final_tokens=self.max_tokens,
            boundaries=PromptBoundaries(system, *turns),
        )
        assert opened is not None
        return self.newest

    def run(self, seq_id: int, ids: list[int], stop: int, *, read: bool = True) -> None:
        """A step that computes a sequence's tokens up to ``stop``."""
        start = self.kv._open[seq_id].next_start
        assert self.kv.reserve(seq_id, stop)
        views = self.kv.views([(seq_id, start, stop - start)])
        segments: Any = views.states

        def after(rows: int) -> int:
            return hash(tuple(ids[: start + rows])) if start + rows else 0

        self.states.advance(segments[0], start, seq_id, views.epoch, after)
        if read:
            self.kv.commit(seq_id, ids[start:stop])
            self.done(views.epoch)

    def done(self, epoch: int) -> None:
        self.states.completed_epoch = epoch
        self.kv.step_completed(epoch)
        self.kv.check_invariants()

    def live(self, ids: list[int], **where: Any) -> int:
        """A whole life: how many of its tokens came from the cache."""
        seq_id = self.open(ids, **where)
        found = self.kv.attach_cached(seq_id)
        self.run(seq_id, ids, len(ids))
        self.leave(seq_id)
        return found

    def leave(self, seq_id: int, *, keep_prefix: bool = True) -> None:
        self.kv.close(seq_id, keep_prefix=keep_prefix)
        self.done(self.kv._issued_epoch)


def test_a_conversation_goes_on_from_the_end_of_its_answer() -> None:
    stage = Stage()
    first = SYSTEM + QUESTION
    assert stage.live(first) == 0
    assert stage.live(first + QUESTION) == 3 * TOKENS, "the last boundary before its end"
    assert stage.kv.copied_bytes == 0


def test_another_conversation_goes_on_from_the_end_of_the_system_prompt() -> None:
    stage = Stage()
    stage.live(SYSTEM + QUESTION, system=len(SYSTEM))
    assert stage.live(SYSTEM + [7] * 40, system=len(SYSTEM)) == len(SYSTEM)


def test_a_prompt_whose_thoughts_were_dropped_goes_on_from_the_end_of_the_messages() -> None:
    stage = Stage()
    asked = SYSTEM + QUESTION
    stage.live(asked + [5] * 3 * TOKENS, turns=(0, len(asked)))
    assert stage.live(asked + [6] * TOKENS) == 3 * TOKENS


def test_where_two_prompts_part_the_second_one_leaves_a_state_for_the_third() -> None:
    stage = Stage()
    stage.live(SYSTEM + [1] * 3 * TOKENS)
    assert stage.live(SYSTEM + [2] * 3 * TOKENS) == 0, "blocks are cached, and no state is"
    assert stage.live(SYSTEM + [3] * 3 * TOKENS) == len(SYSTEM)


def test_prompts_go_on_exactly_where_a_state_is_kept() -> None:
    stage = Stage(num_slots=8, max_tokens=320)
    rng = Random(1)
    talks = [SYSTEM + [talk] * 3 for talk in range(4)]
    seen = set[int]()
    for _ in range(60):
        talk = rng.choice(talks)
        talk += [rng.randrange(100)] * rng.randint(1, 2 * TOKENS)
        if len(talk) > stage.max_tokens:
            del talk[len(SYSTEM) + rng.randint(0, 2 * TOKENS) :]
            talk.append(rng.randrange(100))
        settle(stage.kv, stage.memory)
        states = {slot.digest for slot in stage.pool.slots}
        hashes = stage.kv.block_hashes(PrefixSalt())
        hashes.extend(talk, 0)
        kept = [n for n, its in enumerate(hashes.digests, 1) if its in states]
        kept = [blocks for blocks in kept if blocks <= hashes.shareable_blocks]
        found = stage.live(talk, system=len(SYSTEM))
        assert found == max(kept, default=0) * TOKENS
        seen.add(found)
    assert len(seen) > 5
    assert stage.pool.num_evicted > 0


def explained(stage: Stage, ids: list[int]) -> tuple[int, MissReason | None]:
    """Why a prompt shares no more; it leaves nothing behind."""
    seq_id = stage.open(ids)
    found = stage.kv.explain(seq_id)
    stage.leave(seq_id)
    return found


def test_a_prompt_that_leaves_where_no_state_was_kept_hears_so() -> None:
    stage = Stage()
    stage.live(SYSTEM + [1] * 3 * TOKENS)
    other = SYSTEM + [2] * 3 * TOKENS
    assert explained(stage, other) == (len(SYSTEM), MissReason.NO_STATE)
    stage.live(other)
    assert explained(stage, SYSTEM + [3] * 2 * TOKENS) == (len(SYSTEM), MissReason.NEVER_CACHED)
    assert explained(stage, [9] * 2 * TOKENS) == (0, MissReason.NEVER_CACHED)


def test_a_prompt_that_leaves_where_the_state_was_evicted_hears_so() -> None:
    stage = Stage()
    ids = SYSTEM + QUESTION
    stage.live(ids)
    assert explained(stage, [*ids, 1]) == (3 * TOKENS, None)
    pool = stage.pool
    assert pool.evict()
    assert pool.stats(1, 0).evicted == 1
    assert explained(stage, [*ids, 1]) == (3 * TOKENS, MissReason.STATE_EVICTED)
    assert explained(stage, SYSTEM + [4] * TOKENS) == (len(SYSTEM), MissReason.NO_STATE)
    stage.live(ids)
    assert explained(stage, [*ids, 1]) == (3 * TOKENS, None), "it has come back"


def test_states_go_with_their_blocks_and_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    ids = SYSTEM + QUESTION
    stage.live(ids)
    settle(stage.kv, stage.memory)
    stage.kv.evict_prefixes()
    assert explained(stage, ids) == (0, MissReason.EVICTED), "nothing of it is cached"
    stage.live(ids + [7] * TOKENS)
    assert explained(stage, [*ids[:-1], 8]) == (len(ids) - 1, MissReason.STATE_EVICTED)
    monkeypatch.setattr(evictor, "REMEMBERED_EVICTIONS", 1)
    stage.live([6] * 2 * TOKENS)
    while stage.pool.evict():
        pass
    assert explained(stage, [*ids[:-1], 8])[1] is MissReason.NO_STATE, "too long ago"


def test_a_state_that_came_back_and_was_in_doubt_was_not_evicted() -> None:
    stage = Stage()
    ids = SYSTEM + QUESTION
    stage.live(ids)
    settle(stage.kv, stage.memory)
    assert stage.pool.evict()
    failed = stage.open(ids)
    stage.run(failed, ids, len(ids))
    stage.leave(failed, keep_prefix=False)
    stage.live(ids + [7] * TOKENS)
    assert explained(stage, [*ids[:-1], 8])[1] is MissReason.NO_STATE


def test_what_comes_while_a_sequence_waits_is_no_missing_state() -> None:
    stage = Stage()
    ids = SYSTEM + QUESTION
    first, second = stage.open(ids), stage.open(ids)
    stage.run(first, ids, len(ids))
    stage.leave(first)
    assert stage.kv.explain(second)[1] is None
    stage.leave(second)


def test_what_a_failed_sequence_wrote_is_not_found() -> None:
    stage = Stage()
    ids = SYSTEM + QUESTION
    seq_id = stage.open(ids, system=len(SYSTEM))
    stage.run(seq_id, ids, len(ids))
    stage.leave(seq_id, keep_prefix=False)
    assert stage.live(ids, system=len(SYSTEM)) == 0


@pytest.mark.parametrize("failed", [True, False])
def test_a_sequence_that_fails_where_it_began_makes_no_end_of_that_state(failed: bool) -> None:
    stage = Stage()
    ids = SYSTEM + QUESTION
    stage.live(ids)
    seq_id = stage.open([*ids, 1])
    (slot,) = (slot for slot in stage.pool.slots if slot.holders)
    slot.retention = Retention.WAYPOINT
    stage.leave(seq_id, keep_prefix=not failed)
    assert slot.retention is (Retention.WAYPOINT if failed else Retention.END)


def test_a_long_prompt_leaves_waypoints_and_they_are_evicted_first() -> None:
    stage = Stage(num_slots=6, max_tokens=2 * WAYPOINT_TOKENS + 320)
    long = SYSTEM + list(range(WAYPOINT_TOKENS))
    stage.live(long, system=len(SYSTEM))
    other = long[: WAYPOINT_TOKENS + 8] + [9] * TOKENS
    assert stage.live(other) == WAYPOINT_TOKENS
    for number in range(3):
        stage.live([number] * 3 * TOKENS)
    assert stage.live([*long[: WAYPOINT_TOKENS + 8], 8] * 1) == len(SYSTEM)


def test_the_oldest_ends_of_a_conversation_become_waypoints() -> None:
    stage = Stage(num_slots=7)
    ids = SYSTEM + QUESTION
    for _ in range(3):
        stage.live(ids, system=len(SYSTEM))
        ids = ids + [len(ids)] * 2 * TOKENS
    for number in range(2):
        stage.live([number] * 3 * TOKENS)
    assert stage.live(ids, system=len(SYSTEM)) == (len(ids) - 2 * TOKENS) // TOKENS * TOKENS
    assert stage.live([*SYSTEM, 1], system=len(SYSTEM)) == len(SYSTEM)


def test_what_saves_many_tokens_stays_longer_than_what_was_used_later() -> None:
    stage = Stage(num_slots=7)
    system = list(range(3000, 3000 + 12 * TOKENS))
    stage.live([*system, 1], system=len(system))
    for number in range(6):
        stage.live([number] * TOKENS)
    assert stage.live([*system, 2], system=len(system)) == len(system)


def test_what_has_not_been_used_for_long_goes_although_it_saves_more() -> None:
    stage = Stage(num_slots=5)
    system = list(range(3000, 3000 + 4 * TOKENS))
    stage.live([*system, 1], system=len(system))
    for number in range(24):
        stage.live([number] * TOKENS)
    assert stage.live([*system, 2], system=len(system)) == 0


def test_an_answer_of_few_tokens_leaves_an_end_as_well() -> None:
    stage = Stage(num_slots=6)
    question = [*QUESTION, 1]
    stage.live(question)
    for number in range(4):
        stage.live([number] * 2 * TOKENS)
    assert stage.live([*question, 2]) == TOKENS


def test_answers_that_a_conversation_has_left_go_before_what_it_goes_on_from() -> None:
    stage = Stage(num_slots=8)
    question = SYSTEM + QUESTION
    asked = {"system": len(SYSTEM), "turns": (len(question), len(question))}
    left, right = ([*question, *[number] * 8 * TOKENS] for number in (5, 6))
    for ids in (question, left, right):
        stage.live(ids, **asked)
    for number in range(5):
        stage.live([number] * TOKENS)
    assert stage.live([*right, 7], **asked) == 11 * TOKENS
    assert stage.live([*left, 7], **asked) == 3 * TOKENS


def test_a_waypoint_is_not_written_where_something_better_would_have_to_go() -> None:
    stage = Stage(num_slots=5, max_tokens=2 * WAYPOINT_TOKENS + 320)
    for number in range(5):
        stage.live([number] * TOKENS)
    long = list(range(WAYPOINT_TOKENS + 2 * TOKENS + 1))
    stage.live(long)
    assert stage.pool.num_evicted == 2, "the last boundary, and the end"
    assert stage.live([*long[: WAYPOINT_TOKENS + 8], 9]) == 0


def test_where_slots_are_few_a_step_waits_for_the_one_before_it_and_evicts_nothing() -> None:
    stage = Stage(num_slots=3)
    ids = SYSTEM + QUESTION
    stage.live([7] * TOKENS)
    seq_id = stage.open(ids)
    stage.run(seq_id, ids, TOKENS + 3)
    stage.run(seq_id, ids, 2 * TOKENS, read=False)
    assert not stage.kv.reserve(seq_id, 2 * TOKENS + 1), "a slot comes back with that step"
    stage.kv.commit(seq_id, ids[TOKENS + 3 : 2 * TOKENS])
    stage.done(stage.kv._issued_epoch)
    assert stage.kv.reserve(seq_id, 2 * TOKENS + 1)
    assert stage.pool.num_evicted == 0


def test_a_dropped_step_counts_for_nothing() -> None:
    stage = Stage()
    ids = SYSTEM + QUESTION
    seq_id = stage.open(ids)
    stage.run(seq_id, ids, 2 * TOKENS + 3)
    stage.run(seq_id, ids, 2 * TOKENS + 7, read=False)
    stage.done(stage.kv._issued_epoch)
    stage.kv.cancel_steps(seq_id)
    assert stage.kv._open[seq_id].progress.computed == 2 * TOKENS
    stage.run(seq_id, ids, len(ids))
    stage.leave(seq_id)


def test_slots_that_were_reserved_and_not_written_are_free_again() -> None:
    stage = Stage(num_slots=3)
    for number in range(2):
        seq_id = stage.open([number] * TOKENS)
        assert stage.kv.reserve(seq_id, TOKENS)
        stage.leave(seq_id)


def test_a_sequence_without_room_for_its_slots_is_not_opened() -> None:
    stage = Stage(num_slots=5)
    stage.open(SYSTEM)
    hashes = stage.kv.block_hashes(PrefixSalt())
    hashes.extend(QUESTION, 0)
    assert stage.kv.open(9, hashes, len(QUESTION), final_tokens=320) is None


@pytest.mark.parametrize("room", [3, 6, 12])
def test_slots_get_memory_as_they_are_needed(room: int) -> None:
    stage = Stage(num_slots=12)
    stage.states.room = room
    for number in range(12):
        stage.live([number] * (2 * TOKENS + 1))
        assert stage.states.allocated == set(range(min(room, 2 + number))), "the first ones first"
    assert stage.pool.num_evicted == 13 - room, "what is refused is taken from the cache"


def test_a_sequence_whose_slots_are_refused_waits() -> None:
    stage = Stage()
    seq_id = stage.open(SYSTEM)
    for stage.states.room in (1, 2):
        assert stage.kv.reserve(seq_id, TOKENS + 1) == (stage.states.room == 2)
    stage.kv.check_invariants()


def test_idle_memory_of_slots_goes_back() -> None:
    stage = Stage()
    stage.live(SYSTEM + QUESTION)
    while stage.pool.evict():
        pass
    stage.kv.release_idle_memory()
    assert stage.states.released == len({0, 1}), "the boundary's slot, and the one beyond it"
    assert not stage.states.written


@pytest.mark.parametrize(
    ("slot_bytes", "releases_slots", "evicted"),
    [(64 * BLOCK, True, (0, 1)), (BLOCK // 64, True, (1, 1)), (64 * BLOCK, False, (1, 1))],
)
def test_what_saves_least_per_byte_that_goes_back_is_evicted_first_and_a_slot_goes_with_its_block(
    monkeypatch: pytest.MonkeyPatch, slot_bytes: int, releases_slots: bool, evicted: tuple[int, int]
) -> None:
    stage = Stage()
    ids = SYSTEM + QUESTION
    stage.live(ids, turns=(len(ids), len(ids)))
    settle(stage.kv, stage.memory)
    group = state_group(stage.kv)
    group._layout = replace(group._layout, slot_bytes=slot_bytes)
    stage.states.releases_slots = releases_slots
    monkeypatch.setattr(evictor, "EVICTED_AT_ONCE", 1)
    stage.kv.evict_prefixes()
    stats = stage.kv.stats()
    assert (stats.evicted_blocks, stats.slots.evicted) == evicted
    assert stats.slots.committed_bytes == 0, "its memory goes back at once"


def test_all_slots_are_counted_once_by_what_they_are_for() -> None:
    stage = Stage(num_slots=12)
    ids = SYSTEM + QUESTION
    first = stage.open(ids, system=len(SYSTEM), turns=(0, 3 * TOKENS))
    stage.run(first, ids, len(ids) - 1)
    size = stage.states.slot_bytes
    stats = stage.kv.stats()
    slots = stats.slots
    assert (slots.slots, slots.free, slots.held, slots.waiting) == (12, 9, 2, 0)
    assert dict(slots.cached) == {"waypoint": 0, "end": 0, "user": 0, "system": 1}
    assert (slots.slot_bytes, slots.committed_bytes) == (SLOT_BYTES, 3 * size)
    assert stats.committed_bytes == stage.memory.committed_bytes() + 3 * size
    stage.run(first, ids, len(ids), read=False)
    stage.kv.close(first)
    slots = stage.kv.stats().slots
    assert (slots.free, slots.held, slots.waiting) == (9, 0, 1), "a step may touch what it wrote"
    assert dict(slots.cached) == {"waypoint": 0, "end": 1, "user": 0, "system": 1}
    stage.done(stage.kv._issued_epoch)
    assert stage.kv.stats().slots.free == 10
    while stage.pool.evict():
        pass
    stage.kv.release_idle_memory()
    slots = stage.kv.stats().slots
    assert (slots.free, slots.evicted, slots.committed_bytes) == (12, 2, 0)


def test_the_memory_map_shows_where_the_slots_of_a_conversation_stand() -> None:
    stage = Stage()
    ids = SYSTEM + QUESTION
    stage.live(ids, system=len(SYSTEM))
    stage.live(ids + [4] * 2 * TOKENS, system=len(SYSTEM))
    stage.live(SYSTEM + [5] * 2 * TOKENS, system=len(SYSTEM))
    holders = [stage.open(SYSTEM + [5] * 2 * TOKENS, system=len(SYSTEM)) for _ in range(2)]
    stage.kv.check_invariants()
    assert stage.kv.stats().slots.held == 1
    found = sorted(stage.kv.memory_map().slots)
    assert found == [
        SealedSlot(1, len(SYSTEM), "system", 0),
        SealedSlot(1, 3 * TOKENS, "end", 0),
        SealedSlot(1, 5 * TOKENS, "end", 0),
        SealedSlot(3, 3 * TOKENS, "waypoint", 2),
        SealedSlot(3, 4 * TOKENS, "end", 0),
    ]
    for holder in holders:
        stage.leave(holder)


def test_a_layers_states_are_advanced_in_the_order_of_its_tokens() -> None:
    seen = []

    class Rows:
        def recur(self, token: mx.array, number: int, *inputs: Any) -> tuple[mx.array, mx.array]:
            seen.append((token.item(), number))
            return token + 1, inputs[0]

    tokens = OrderingHandles(0, num_states=2)
    delta: Any = None
    rows: Any = Rows()
    views = KVViews([], tokens, [1], 1)
    views.states = rows
    x = mx.zeros((1, 4))
    for number in (0, 1, 0):
        assert views.recur(number, x, x, x, x, delta) is x
    assert seen == [(0, 0), (0, 1), (1, 0)]
    assert [token.item() for token in views.step_end([])] == [2, 1]
    views.cancel()
    assert [token.item() for token in tokens.newest_states] == [0, 0]


def test_slots_are_named_in_what_is_said_of_them() -> None:
    stage = Stage()
    stage.live(SYSTEM)
    with pytest.raises(AssertionError, match="slot 0 has no holder"):
        stage.pool.let_go(stage.pool.slots[0])


def test_a_block_that_kept_drafts_fill_is_not_sealed_before_a_state_follows_it() -> None:
    stage = Stage()
    ids, newest = list(range(2 * TOKENS)), TOKENS - 3
    seq_id = stage.open(ids)
    stage.run(seq_id, ids, newest)
    assert stage.kv.reserve(seq_id, TOKENS + 2, 4)
    views = stage.kv.views([(seq_id, newest, 5)], {seq_id: 4})
    stage.kv.commit(seq_id, ids[newest : TOKENS + 2])
    stage.done(views.epoch)
    # A step that is dropped takes the newest state along: all is computed again.
    stage.kv.cancel_steps(seq_id)
    assert stage.kv._open[seq_id].progress.computed == 0
    stage.done(views.epoch)
    stage.run(seq_id, ids, TOKENS + 2)
    stage.leave(seq_id)
