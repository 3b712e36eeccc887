"""What the tier reads and writes, and when, around small caches over strict memory."""

import errno
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvcache.allocator import MAP_AHEAD_AT_POINT_TOKENS
from kvcache.backends.backend import Releases
from kvcache.block_hashes import BlockHashes, PrefixSalt
from kvcache.sequences import CachedSequence, PromptBoundaries
from kvcache.slots import SLOTS_PER_SEQUENCE
from kvcache.stats import DiskStats, MissReason
from kvcache.tier import tier as product
from kvcache.tier import workers
from kvcache.tier.store import RecordStore, System, TierLimits
from kvcache.tier.tier import DiskTier
from tests.kvcache.managers import (
    BLOCK,
    TOKENS,
    full_group,
    grow,
    join,
    manager,
    settle,
    small_manager,
    windowed,
)
from tests.kvcache.strict_memory import StrictMemory
from tests.kvcache.test_state_cache import SLOT_BYTES, Stage
from tests.kvcache.tier.records import ROOMY, Clock, FailingSystem
from tests.kvcache.tier.workers import PlayedWorkers

SALT = PrefixSalt(b"somebody", may_be_written=True)
IDS = list(range(3 * TOKENS + 4))
OTHER = [8] * 40
ENDED = PromptBoundaries(0, messages_end=len(IDS))


class Windows:
    """A small cache for a layer of each kind."""

    def __init__(self, window: int = 8 * TOKENS, heaps: int = 3) -> None:
        layout = windowed(window=window)
        self.memories = [StrictMemory(group) for group in layout.groups]
        budget_bytes = heaps * sum(group.heap_bytes for group in layout.groups)
        self.kv = manager(layout, [*self.memories], budget_bytes=budget_bytes)
        self.memory: Any = self

    def complete(self) -> None:
        for memory in self.memories:
            memory.complete()


@dataclass
class Cache:
    """A cache with a tier whose clock and threads are the test's."""

    folder: Path
    heaps: int = 2
    limits: TierLimits = ROOMY
    system: System = field(default_factory=System)
    max_sharers: int = 1000
    memory_changes: dict[str, Any] = field(default_factory=dict)
    stage: "Stage | Windows | None" = None
    """A cache with states or windows, in place of the usual one."""
    seconds: Callable[[int, int], float] = lambda start, end: float(end - start)
    clock: Clock = field(default_factory=Clock)
    workers: PlayedWorkers = field(default_factory=PlayedWorkers)
    newest: int = 100
    told_bytes: int = 0

    def __post_init__(self) -> None:
        self.kv, self.memory = (
            (self.stage.kv, self.stage.memory)
            if self.stage is not None
            else small_manager(
                heaps=self.heaps, max_sharers=self.max_sharers, **self.memory_changes
            )
        )
        clock, limits = self.clock, self.limits
        self.store = RecordStore(self.folder, limits, clock=clock, system=self.system)
        self.tier = self.kv._tier = DiskTier(
            self.store,
            self.kv._groups,
            tag=b"tag",
            tokens_per_block=TOKENS,
            prepare=self.kv._finish_mappings,
            seconds=self.seconds,
            clock=clock,
            workers=self.workers,
        )

    @property
    def stats(self) -> DiskStats:
        return self.kv.disk_stats()

    def after(self, seconds: float) -> int:
        """Let time pass. Return the bytes that were written since the last call."""
        self.clock.now += seconds
        for _ in range(9):
            settle(self.kv, self.memory)
        before, self.told_bytes = self.told_bytes, self.stats.written_bytes
        return self.told_bytes - before

    @property
    def free_blocks(self) -> int:
        return full_group(self.kv).allocator.available_blocks

    def hashes(self, ids: list[int], salt: PrefixSalt = SALT) -> BlockHashes:
        hashes = self.kv.block_hashes(salt)
        hashes.extend(ids, 0)
        return hashes

    def waits(self, seq_id: int, ids: list[int] = IDS, salt: PrefixSalt = SALT) -> bool:
        waits = self.kv.waits_for_disk(seq_id, self.hashes(ids, salt), ENDED)
        self.kv.check_invariants()
        return waits

    def live(self, ids: list[int] = IDS, salt: PrefixSalt = SALT, *, keep: bool = True) -> int:
        """A whole life. Return how many of its tokens came from the cache."""
        self.newest += 1
        assert join(self.kv, self.newest, ids, salt=salt)
        found = self.kv._open[self.newest].progress.computed
        grow(self.kv, self.newest, found, len(ids) - found, ids)
        self.kv.close(self.newest, keep_prefix=keep)
        settle(self.kv, self.memory)
        return found

    def restarted(self, **changes: Any) -> "Cache":
        self.store.close()
        fresh: dict[str, Any] = {"workers": PlayedWorkers(), "clock": Clock(self.clock.now)}
        return replace(self, told_bytes=0, **fresh | changes)


@pytest.fixture
def written(tmp_path: Path) -> Cache:
    """A cache whose disk has the blocks of two prompts, and whose memory has nothing."""
    cache = Cache(tmp_path)
    cache.live()
    cache.live(OTHER)
    assert cache.after(60) == 5 * BLOCK
    return cache.restarted()


def test_an_end_is_written_once_nobody_has_continued_it_for_a_minute(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.live()
    cache.live(salt=replace(SALT, may_be_written=False), ids=[7] * 40)
    cache.live([8] * 40, keep=False)
    assert 59.9 < cache.kv.disk_poll_s() <= 60
    assert cache.after(59.9) == 0
    assert cache.after(0.1) == 3 * BLOCK
    assert cache.stats.pending_writes == 0
    assert cache.kv.disk_poll_s() == float("inf")


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("may_be_written", [True, False])
@pytest.mark.parametrize("shared", [1, 2, 3, 6, 11])
def test_what_a_sequence_computes_is_written_once_it_has_ended_well(
    tmp_path: Path, shared: int, may_be_written: bool, fails: bool
) -> None:
    """If it fails, its blocks may be wrong, and those that others have computed from them."""
    cache = Cache(tmp_path, heaps=8)
    cache.live(LONGER[: TOKENS + 4])
    assert cache.after(60) == BLOCK
    assert join(cache.kv, 1, LONGER, salt=replace(SALT, may_be_written=may_be_written))
    grow(cache.kv, 1, TOKENS, len(LONGER) - TOKENS, LONGER)
    settle(cache.kv, cache.memory)
    other = [*LONGER[: shared * TOKENS], *[7] * 2 * TOKENS, 7]
    assert cache.live(other) == shared * TOKENS
    is_sound = shared == 1  # this block is of the first sequence
    assert cache.after(60) == 2 * BLOCK * is_sound
    cache.kv.close(1, keep_prefix=not fails)
    cache.after(1)
    keys = [cache.tier._key(digest, 0) for digest in cache.hashes(other).digests]
    kept = [cache.store.find(key) is not None for key in keys]
    assert kept == [True, *[is_sound or not fails] * (shared + 1)]
    cache.after(60)
    last = cache.tier._key(cache.hashes(LONGER).digests[10], 0)
    assert (cache.store.find(last) is not None) == (not fails and (may_be_written or shared == 11))


@pytest.mark.parametrize("kind", ["dense", "windows"])
@pytest.mark.parametrize("others", [5, 6, 7, 9, 10, 11])
def test_a_read_evicts_nothing_of_the_prefix_that_it_continues(
    tmp_path: Path, others: int, kind: str
) -> None:
    ids = LONGER[: 8 * TOKENS + 4]
    cache = Cache(tmp_path, heaps=3, stage=Windows() if kind == "windows" else None)
    cache.live(ids)
    cache.after(60)
    cache.live([7] * (others * TOKENS + 2))
    cache.after(0)
    assert cache.waits(1, ids)
    cache.after(0)
    assert not cache.waits(1, ids)
    assert cache.live(ids) == 8 * TOKENS
    assert cache.stats.read_bytes > 0


@pytest.mark.parametrize("gone", range(8))
def test_a_block_of_a_window_is_read_and_none_of_the_others_evicted(
    tmp_path: Path, gone: int
) -> None:
    ids = LONGER[: 8 * TOKENS + 4]
    cache = Cache(tmp_path, heaps=3, stage=Windows())
    cache.live(ids)
    cache.after(60)
    cache.live([7] * 4 * TOKENS)
    cache.after(0)
    window = full_group(cache.kv, 1).prefixes
    block = window.index.find(cache.hashes(ids), gone)
    assert block is not None
    window.index._remove(block, evicted=True)
    window._pool.free(block)
    cache.live([9] * TOKENS)
    cache.after(0)
    assert cache.waits(1, ids)
    cache.after(0)
    assert not cache.waits(1, ids)
    assert cache.live(ids) == 8 * TOKENS


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("blocks", [4, 5, 6, 7, 8])
def test_what_a_failed_sequence_computed_in_place_of_a_read_window_is_not_found(
    tmp_path: Path, blocks: int, scores: bool
) -> None:
    """It computes all anew: its scores need that, or memory has lost the rows of other layers."""
    ids = LONGER[: blocks * TOKENS + 4]
    cache = read_window(tmp_path, ids)
    hashes = cache.hashes(ids, replace(SALT, may_be_written=False))
    if scores:
        hashes.max_cached_tokens = 0
    else:
        full_group(cache.kv).prefixes.evict(100)
    assert cache.kv.open(50, hashes, len(ids), final_tokens=len(ids)) is not None
    grow(cache.kv, 50, 0, len(ids), ids)
    cache.kv.step_completed(cache.kv._issued_epoch)
    own = set(map(id, full_group(cache.kv, 1)._open[50].blocks))
    cache.kv.close(50, keep_prefix=False)
    settle(cache.kv, cache.memory)
    index = full_group(cache.kv, 1).prefixes.index
    blocks_left = [index.find(hashes, number) for number in range(blocks)]
    assert not own.intersection(map(id, filter(None, blocks_left)))


@pytest.mark.parametrize("blocks", [4, 5, 6, 7, 8])
def test_a_read_window_stays_if_a_sequence_fails_that_continues_it(
    tmp_path: Path, blocks: int
) -> None:
    ids = LONGER[: blocks * TOKENS + 4]
    cache = read_window(tmp_path, ids)
    salt = replace(SALT, may_be_written=False)
    assert cache.live(LONGER[: (blocks + 2) * TOKENS], salt=salt, keep=False) == blocks * TOKENS
    assert cache.live(ids, salt=salt) == blocks * TOKENS


def read_window(folder: Path, ids: list[int]) -> Cache:
    """Return a cache that has read a prefix: of the window, only the newest blocks."""
    cache = Cache(folder, stage=Windows(24, heaps=8))
    cache.live(ids)
    cache.after(60)
    cache = cache.restarted(stage=Windows(24, heaps=8))
    assert cache.waits(1, ids)
    cache.after(0)
    assert not cache.waits(1, ids)
    cache.kv.stop_waiting(1)
    return cache


def test_what_is_hit_is_written_and_of_a_conversation_the_newest_end_alone(tmp_path: Path) -> None:
    stage = Stage()
    cache, ids = Cache(tmp_path, stage=stage), list(range(6 * TOKENS + 4))
    system, first, second = 2 * TOKENS, ids[: 4 * TOKENS + 2], ids

    def live(ids: list[int]) -> None:
        stage.newest += 1
        ends = PromptBoundaries(system, messages_end=len(ids))
        seq_id, hashes = stage.newest, cache.hashes(ids)
        assert stage.kv.open(seq_id, hashes, len(ids), final_tokens=320, boundaries=ends)
        stage.run(seq_id, ids, len(ids))
        stage.leave(seq_id)

    live(first)
    assert cache.after(1) == 2 * BLOCK + SLOT_BYTES, "the end of the system prompt"
    live(second)
    assert cache.after(50) == 2 * BLOCK, "what was hit"
    assert cache.after(9) == 0, "the older end is no end any more"
    assert cache.after(9) == 2 * BLOCK + SLOT_BYTES


@pytest.mark.parametrize(
    ("limits", "passed_s"), [({"per_hour": 3 * BLOCK}, 3700), ({"per_day": 3 * BLOCK}, 90_000)]
)
def test_what_the_bounds_forbid_is_written_later(
    limits: dict[str, int], passed_s: int, tmp_path: Path
) -> None:
    cache = Cache(tmp_path, limits=replace(ROOMY, **limits))
    cache.live()
    assert cache.after(60) == 3 * BLOCK
    cache.live([9] * 40)
    assert cache.after(100) == 0
    assert cache.kv.disk_poll_s() <= product.LONGEST_REST_S
    assert cache.after(passed_s) == 2 * BLOCK


def test_a_small_folder_takes_few_records_together(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limits=TierLimits(held=2 * BLOCK))
    cache.live()
    assert cache.after(60) == 3 * BLOCK
    assert cache.stats.held_bytes == 2 * BLOCK


def test_a_full_disk_is_a_failure_and_tried_again_after_a_rest(tmp_path: Path) -> None:
    system = FailingSystem()
    cache = Cache(tmp_path, system=system)
    cache.live()
    system.fail("fsync", 0, errno.ENOSPC)
    assert cache.after(60) == 0
    assert cache.stats.failures == 1
    assert cache.after(60) == 3 * BLOCK


def test_of_records_that_wait_to_be_written_the_oldest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "MOST_DUE", 4)
    cache = Cache(tmp_path, heaps=8)
    cache.live()
    cache.live(OTHER)
    assert cache.after(60) == 2 * BLOCK, "no part of the older one"
    longest = [9] * 8 * TOKENS
    cache.live(longest)
    assert cache.after(60) == 4 * BLOCK
    cache = cache.restarted()
    assert cache.waits(1, longest)
    settle(cache.kv, cache.memory)
    assert cache.live(longest) == 4 * TOKENS, "its beginning"


def test_what_a_newer_sequence_shares_with_a_forgotten_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "MOST_DUE", 10)
    cache = Cache(tmp_path, heaps=8)
    cache.workers.holds = lambda: True
    older, newer = ([*range(3 * TOKENS), *[n] * (n * TOKENS + 3)] for n in (4, 2))
    for ids in (older, newer, [8] * (3 * TOKENS + 3)):
        cache.live(ids)
        cache.tier.write_ends_now()
    cache.tier._writing = None  # the first batch is that of the older one: it is not written
    cache.workers.jobs.clear()
    cache.workers.holds = lambda: False
    cache.after(1)
    hashes = cache.hashes(newer)
    assert all(cache.store.find(cache.tier._key(each, 0)) for each in hashes.digests[:5])
    assert cache.stats.written_bytes == 8 * BLOCK


@pytest.mark.parametrize("first", [1, 2, 5, 8, 10])
def test_blocks_that_were_due_at_different_times_are_written_in_order(
    tmp_path: Path, first: int
) -> None:
    cache = Cache(tmp_path, heaps=8)
    cache.live(LONGER)
    cache.after(60)
    digests = cache.hashes(LONGER).digests
    cache.tier._writes_at = cache.clock.now + 1
    for number in (first, *range(11)):
        record = cache.store.find(cache.tier._key(digests[number], 0))
        with cache.store._locked():
            cache.store._remove([record] if record else [])
        cache.live([*LONGER[: 11 * TOKENS], 7])
    cache.workers.holds = lambda: True
    cache.after(2)
    assert cache.tier._writing is not None
    assert cache.tier._writing[1].numbers == [*range(11)]
    cache.workers.holds = lambda: False
    assert cache.after(1) == 11 * BLOCK


def test_what_memory_has_lost_is_not_written_and_delays_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.live()
    cache.live([5] * 6 * TOKENS)
    assert cache.after(60) == 8 * BLOCK, "a block of the first was evicted"


def test_blocks_that_cannot_be_mapped_are_written_a_little_later(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_sharers=1)
    cache.live()
    cache.clock.now += 59.99
    assert join(cache.kv, 1, IDS, salt=SALT)
    assert cache.after(5) == 0, "its blocks have as many buffers as they may"
    grow(cache.kv, 1, 3 * TOKENS, 4, IDS)
    cache.kv.close(1)
    settle(cache.kv, cache.memory)
    assert cache.after(0.1) == 3 * BLOCK


def test_a_prompt_with_too_many_sharers_is_not_read(written: Cache) -> None:
    cache = written.restarted(max_sharers=1)
    assert cache.waits(1)
    settle(cache.kv, cache.memory)
    assert not cache.waits(1)
    assert join(cache.kv, 1, IDS, salt=SALT)
    assert not cache.waits(2), "memory has them, though not for one more"
    cache.kv.check_invariants()


def test_a_salt_that_may_not_be_written_is_not_read(written: Cache) -> None:
    assert not written.waits(1, salt=replace(SALT, may_be_written=False))
    assert not written.waits(2, salt=PrefixSalt(b"another", may_be_written=True))
    assert not written.waits(3, salt=PrefixSalt(b"somebody", b"client", may_be_written=True))
    assert not written.workers.jobs
    assert written.waits(4)


def test_two_prompts_with_one_prefix_read_it_once(written: Cache) -> None:
    longer = [*IDS, *range(900, 940)]
    assert written.waits(1)
    assert written.waits(2, longer)
    settle(written.kv, written.memory)
    assert not written.waits(1)
    assert not written.waits(2, longer)
    assert written.stats.read_bytes == 3 * BLOCK
    assert written.live() == written.live(longer) == 3 * TOKENS


LONGER = [*IDS, *range(900, 900 + 8 * TOKENS)]


@pytest.mark.parametrize("first_leaves", ["aborted", "late", "never"])
@pytest.mark.parametrize("shared", [1, 2, 3])
def test_a_prompt_waits_for_the_reading_of_another_only_for_as_long_as_its_own_may_take(
    tmp_path: Path, shared: int, first_leaves: str
) -> None:
    cache = Cache(tmp_path, heaps=8)
    cache.live(LONGER)
    cache.after(60)
    cache = cache.restarted()
    short = [*LONGER[: shared * TOKENS], *[7] * TOKENS]
    cache.workers.holds = lambda: True
    assert cache.waits(1, LONGER)
    assert cache.waits(2, short)
    if first_leaves == "aborted":
        cache.kv.stop_waiting(1)
        assert cache.waits(2, short), "the reading goes on"
    cache.clock.now += product.LATE_PART * shared * TOKENS + 0.1
    assert not cache.waits(2, short), "its own time is over"
    assert cache.tier.forget(2) is MissReason.DISK_LATE
    if first_leaves == "late":
        cache.clock.now += product.LATE_PART * len(LONGER)
    if first_leaves != "aborted":
        assert cache.waits(1, LONGER) == (first_leaves == "never")
    cache.workers.holds = lambda: False
    settle(cache.kv, cache.memory)
    assert cache.live(LONGER) == (11 * TOKENS if first_leaves == "never" else 0)


@pytest.mark.parametrize("read", [1, 2, 3, 4, 5])
def test_a_prompt_leaves_the_reading_of_another_with_all_that_is_its_own(
    tmp_path: Path, read: int
) -> None:
    cache = Cache(tmp_path, heaps=8)
    cache.live(LONGER)
    cache.after(60)
    cache = cache.restarted()
    short = [*LONGER[: 3 * TOKENS], *[7] * TOKENS]
    cache.workers.holds = lambda: len(cache.workers.jobs) <= 11 - read
    assert cache.waits(1, LONGER)
    assert cache.waits(2, short)
    settle(cache.kv, cache.memory)
    assert cache.waits(2, short) == (read < 3)
    if read >= 3:
        assert cache.tier.forget(2) is None
        assert cache.live(short) == 3 * TOKENS
    assert cache.waits(1, LONGER), "the first one waits for the rest"
    cache.workers.holds = lambda: False
    settle(cache.kv, cache.memory)
    assert cache.live(LONGER) == 11 * TOKENS
    assert cache.stats.read_bytes == 11 * BLOCK, "no record is read twice"


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize(("blocks", "others"), [(8, 8), (8, 5), (5, 8), (3, 9), (9, 4)])
def test_prompts_with_a_common_beginning_read_it_once_and_each_its_own(
    tmp_path: Path, blocks: int, others: int, has_states: bool
) -> None:
    def stage() -> Stage | None:
        return Stage() if has_states else None

    common = list(range(2 * TOKENS))
    first = [*common, *[1] * ((blocks - 2) * TOKENS + 3)]
    other = [*common, *[2] * ((others - 2) * TOKENS + 3)]
    cache = Cache(tmp_path, heaps=9, stage=stage())
    cache.live(first)
    cache.live(other)
    cache.after(60)
    held = cache.stats.held_bytes
    cache = cache.restarted(stage=stage())
    assert cache.waits(1, first)
    assert cache.waits(2, other)
    for _ in range(3):
        settle(cache.kv, cache.memory)
        cache.waits(1, first)
        cache.waits(2, other)
    assert not cache.waits(1, first)
    assert not cache.waits(2, other)
    assert cache.stats.read_bytes == held, "no record twice"
    assert cache.live(first) == blocks * TOKENS
    assert cache.live(other) == others * TOKENS


@pytest.mark.parametrize("blocks", [3, 4, 6, 8, 9])
def test_a_prompt_that_reads_twice_has_the_time_of_one(tmp_path: Path, blocks: int) -> None:
    """It has waited for what it has in common with another one, and begins to read the rest."""
    cache = Cache(tmp_path, heaps=9)
    first, other = ([*range(2 * TOKENS), *[n] * ((blocks - 2) * TOKENS + 3)] for n in (1, 2))
    cache.live(first)
    cache.live(other)
    cache.after(60)
    cache = cache.restarted()
    cache.workers.holds = lambda: len(cache.workers.jobs) <= blocks - 2
    assert cache.waits(1, first)
    assert cache.waits(2, other)
    cache.clock.now += product.LATE_PART * TOKENS
    settle(cache.kv, cache.memory)
    assert cache.waits(2, other)
    assert len(cache.tier._running) == 2
    cache.clock.now += 2 * TOKENS + product.LATE_PART * (blocks - 1) * TOKENS - 0.1
    assert cache.waits(2, other), "it need not compute what it has"
    cache.clock.now += 0.2
    assert not cache.waits(2, other)
    assert cache.tier.forget(2) is MissReason.DISK_LATE


@pytest.mark.parametrize("first_leaves", [True, False])
@pytest.mark.parametrize("in_flight", [2, 3, 5, 7])
def test_a_prompt_reads_its_own_while_transfers_of_the_other_one_end(
    tmp_path: Path, in_flight: int, first_leaves: bool
) -> None:
    """The other one was aborted, or a record of its own was broken."""
    cache = Cache(tmp_path, heaps=9)
    first, other = ([*range(2 * TOKENS), *[n] * (6 * TOKENS + 3)] for n in (1, 2))
    cache.live(first)
    cache.live(other)
    cache.after(60)
    cache = cache.restarted()
    cache.workers.holds = lambda: len(cache.workers.jobs) <= 6
    assert cache.waits(1, first)
    assert cache.waits(2, other)
    cache.tier._running[0].begun.add((0, in_flight))
    if first_leaves:
        cache.kv.stop_waiting(1)
    else:
        cache.tier._give_up(cache.tier._running[0], MissReason.DISK_FAILED)
    settle(cache.kv, cache.memory)
    assert cache.waits(2, other)
    cache.workers.holds = lambda: False
    for _ in range(2):
        settle(cache.kv, cache.memory)
        cache.waits(2, other)
    assert cache.live(other) == 8 * TOKENS


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
def test_a_state_is_shared_though_a_prompt_left_before_its_blocks_were_read(
    tmp_path: Path, blocks: int
) -> None:
    ids = [*range(blocks * TOKENS), 3]
    cache = Cache(tmp_path, stage=Stage())
    cache.live(ids)
    cache.after(60)
    cache = cache.restarted(stage=Stage())
    cache.workers.holds = lambda: True
    assert cache.waits(1, ids)
    assert cache.waits(2, ids)
    last = cache.workers.jobs.pop()
    cache.workers.results.append(last())
    settle(cache.kv, cache.memory)
    assert (1, blocks - 1) not in cache.tier._running[0].outstanding, "the state was read"
    cache.kv.stop_waiting(2)
    cache.workers.holds = lambda: False
    settle(cache.kv, cache.memory)
    assert not cache.waits(1, ids)
    assert cache.live(ids) == blocks * TOKENS


def test_a_prompt_joins_a_reading_of_which_others_have_taken_a_part(tmp_path: Path) -> None:
    cache = Cache(tmp_path, heaps=8)
    cache.live(LONGER)
    cache.after(60)
    cache = cache.restarted()
    cache.workers.holds = lambda: len(cache.workers.jobs) <= 7
    assert cache.waits(1, LONGER)
    assert cache.waits(2, [*LONGER[: 3 * TOKENS], 7])
    settle(cache.kv, cache.memory)
    assert not cache.waits(2, [*LONGER[: 3 * TOKENS], 7])
    assert cache.waits(3, LONGER)
    cache.workers.holds = lambda: False
    settle(cache.kv, cache.memory)
    assert not cache.waits(1, LONGER)
    assert not cache.waits(3, LONGER)
    assert cache.stats.read_bytes == 11 * BLOCK


@pytest.mark.parametrize("hung", [0, 1, 4, 9, 10])
def test_a_record_that_hangs_pins_nothing_that_was_read_behind_it(
    tmp_path: Path, hung: int
) -> None:
    cache = Cache(tmp_path, heaps=8, seconds=lambda start, end: 0.0)
    cache.live(LONGER)
    cache.after(60)
    cache = cache.restarted()
    free = cache.free_blocks
    cache.workers.holds = lambda: True
    assert cache.waits(1, LONGER)
    hanging = cache.workers.jobs.pop(hung)
    cache.tier._running[0].begun.add((0, hung))
    cache.workers.holds = lambda: False
    settle(cache.kv, cache.memory)
    assert cache.waits(1, LONGER)
    cache.clock.now += product.UNKNOWN_LATE_S + 0.1
    assert not cache.waits(1, LONGER)
    settle(cache.kv, cache.memory)
    assert cache.free_blocks == free - hung - 1
    cache.workers.results.append(hanging())
    settle(cache.kv, cache.memory)
    assert cache.free_blocks == free
    assert cache.live(LONGER) == hung * TOKENS


def test_a_prompt_that_is_aborted_lets_go_of_memory_when_its_transfers_end(written: Cache) -> None:
    written.workers.holds = lambda: len(written.workers.jobs) < 3
    assert written.waits(1)
    settle(written.kv, written.memory)
    written.kv.stop_waiting(1)
    assert not written.tier._running, "no thread has begun"
    written.workers.holds = lambda: False
    settle(written.kv, written.memory)
    assert written.live() == TOKENS, "what was read is kept"


def test_a_read_that_ends_in_no_time_pins_what_its_threads_use_alone(written: Cache) -> None:
    """Reader threads hang in a disk that is gone: their blocks stay pinned, and no others."""
    cache = written.restarted(seconds=lambda start, end: 0.0)
    cache.workers.holds = lambda: True
    assert cache.waits(1)
    free = cache.free_blocks
    cache.tier._running[0].begun.add((0, 0))
    cache.clock.now += product.UNKNOWN_LATE_S + 0.1
    assert not cache.waits(1)
    assert cache.tier.forget(1) is MissReason.DISK_LATE
    cache.clock.now += product.RETRY_S + 0.01
    for number, ids in ((2, IDS), (3, OTHER)):
        assert not cache.waits(number, ids), "the disk still uses memory of the last read"
        assert cache.tier.forget(number) is MissReason.DISK_LATE
    assert cache.kv.recovering
    assert cache.free_blocks == free + 2, "of three blocks a thread uses one"
    cache.clock.now += product.TRANSFER_LIMIT_S
    assert not cache.kv.recovering, "it may never end"
    assert cache.kv.disk_poll_s() == product.LATE_POLL_S
    assert len(cache.workers.jobs) == 3
    cache.workers.holds = lambda: False
    settle(cache.kv, cache.memory)
    assert not cache.tier._running
    assert cache.live() == 0


def test_a_read_waits_for_memory_and_gives_way_to_what_runs(written: Cache) -> None:
    cache = written.restarted(heaps=1)
    assert join(cache.kv, 1, [1] * 40)
    grow(cache.kv, 1, 0, 40)
    assert cache.waits(2), "there is memory for a block, and it lacks three"
    settle(cache.kv, cache.memory)
    assert cache.waits(2)
    assert cache.kv.recovering
    assert not cache.kv.reserve(1, 5 * TOKENS)
    assert not cache.waits(2)
    cache.kv.close(1)
    settle(cache.kv, cache.memory)
    assert cache.live() == 0
    assert cache.tier._bytes_per_s == product.FIRST_READ_BYTES_PER_S


@pytest.mark.parametrize("more", [1, 2, 3, 4, 5])
def test_a_read_goes_on_where_memory_is_refused_until_a_mapping_point_or_for_drafts(
    written: Cache, more: int
) -> None:
    points = {"maps_while_running": False, "releases": Releases.NOTHING}
    cache = written.restarted(heaps=8, memory_changes=points)
    cache.workers.holds = lambda: True
    assert join(cache.kv, 1, TOKENS, final=20 * TOKENS)
    assert cache.waits(2)
    grow(cache.kv, 1, 0, TOKENS)
    assert not cache.kv.reserve(1, (1 + MAP_AHEAD_AT_POINT_TOKENS // TOKENS + more) * TOKENS)
    assert cache.kv.wants_mapping_point
    assert cache.waits(2)
    cache.memory.completed_epoch = cache.memory.opened_epoch
    settle(cache.kv, cache.memory)
    assert cache.kv.reserve(1, 10 * TOKENS)
    assert not cache.kv.reserve(1, (60 + more) * TOKENS, more), "it would have drafts"
    assert cache.waits(2)
    assert not cache.kv.reserve(1, (60 + more) * TOKENS)
    assert not cache.waits(2)


@pytest.mark.parametrize("blocks", [11, 12, 13, 14, 15, 16])
def test_blocks_that_wait_to_be_written_keep_no_memory_from_what_runs(
    tmp_path: Path, blocks: int
) -> None:
    """A batch that follows another at once would look like memory that becomes free."""
    cache = Cache(tmp_path, heaps=5)
    full_group(cache.kv).most_lent = 1
    ids = list(range(blocks * TOKENS + 4))
    cache.workers.holds = lambda: True
    cache.live(ids)
    assert join(cache.kv, 1, [*ids, *[5] * 4], salt=SALT, final=320)
    grow(cache.kv, 1, blocks * TOKENS, 8, [*ids, *[5] * 4])
    assert join(cache.kv, 2, (18 - blocks) * TOKENS, final=320)
    grow(cache.kv, 2, 0, (18 - blocks) * TOKENS)
    cache.workers.holds = lambda: False
    for _ in range(3):
        assert not cache.kv.reserve(2, (21 - blocks) * TOKENS)
        cache.clock.now += 0.2
        settle(cache.kv, cache.memory)
    assert not cache.kv.recovering
    assert cache.stats.pending_writes > blocks - 3


@pytest.mark.parametrize("every_s", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_memory_that_is_refused_again_and_again_ends_no_writing(
    tmp_path: Path, every_s: float
) -> None:
    cache = Cache(tmp_path, heaps=8)
    full_group(cache.kv).most_lent = 1
    cache.live(LONGER)
    cache.clock.now += 60
    for _ in range(int(20 / every_s)):
        cache.tier.give_up_reads()
        cache.after(every_s)
    assert cache.stats.held_bytes == 11 * BLOCK


@pytest.mark.parametrize("more", [0, 1, 2])
@pytest.mark.parametrize("shared", [1, 2, 3, 6, 9])
def test_nothing_is_adopted_behind_blocks_that_others_have_computed_anew(
    tmp_path: Path, shared: int, more: int
) -> None:
    cache = Cache(tmp_path, heaps=8)
    cache.live(LONGER)
    cache.after(60)
    cache = cache.restarted(heaps=8)
    start = LONGER[: shared * TOKENS + 1]
    assert join(cache.kv, 1, start, salt=SALT)
    grow(cache.kv, 1, 0, len(start), start)
    settle(cache.kv, cache.memory)
    cache.workers.holds = lambda: True
    assert cache.waits(2, LONGER)
    cache.kv.close(1, keep_prefix=False)
    cache.live(LONGER[: (shared + more) * TOKENS + 1])
    cache.workers.holds = lambda: False
    cache.tier.update()
    cache.kv.check_invariants()
    cache.after(0)
    assert cache.live(LONGER) == (shared + more) * TOKENS


@pytest.mark.parametrize("cached", [0, 1, 2, 5, 9])
def test_nothing_is_adopted_behind_a_read_block_that_others_have_computed_anew(
    tmp_path: Path, cached: int
) -> None:
    cache = Cache(tmp_path, heaps=8)
    cache.live(LONGER)
    cache.after(60)
    cache = cache.restarted(heaps=8)
    salt = replace(SALT, may_be_written=False)
    cache.live(LONGER[: cached * TOKENS + 4], salt=salt)
    cache.workers.holds = lambda: True
    assert cache.waits(2, LONGER)
    assert cache.waits(3, LONGER), "it waits for the same reading"
    start = LONGER[: (cached + 1) * TOKENS + 1]
    assert join(cache.kv, 1, start, salt=salt)
    grow(cache.kv, 1, cached * TOKENS, 1, start)
    cache.workers.results.append(cache.workers.jobs.pop(0)())
    cache.tier.update()
    cache.kv.stop_waiting(2)
    cache.kv.close(1, keep_prefix=False)
    cache.live(start, salt=salt)
    cache.workers.holds = lambda: False
    cache.tier.update()
    cache.kv.check_invariants()


def test_a_disk_that_seems_slower_than_computing_is_forgiven(written: Cache) -> None:
    cache = written.restarted(seconds=lambda start, end: (end - start) * 2e-4)
    cache.tier._bytes_per_s = 1e6
    for number in range(20):
        if cache.waits(number):
            break
        assert cache.tier.forget(number) is MissReason.DISK_SLOWER
    assert 3 < number < 20


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 1.5])
@pytest.mark.parametrize("has_states", [False, True])
def test_a_read_that_helps_only_in_whole_is_begun_if_it_can_end_in_its_time(
    tmp_path: Path, share: float, has_states: bool
) -> None:
    """Blocks alone help one by one. With states, a prompt begins at the state's end or nowhere."""
    cache = Cache(tmp_path, stage=Stage() if has_states else None, seconds=lambda start, end: 9.0)
    cache.live()
    cache.after(60)
    nbytes = cache.stats.held_bytes
    cache = cache.restarted(stage=Stage() if has_states else None)
    cache.tier._bytes_per_s = nbytes / (9.0 * share)
    assert cache.waits(1) == (share < (product.LATE_PART if has_states else 1))


@pytest.mark.parametrize("computing_s", [1e-6, 1e-3, 0.04, 0.06, 10.0])
@pytest.mark.parametrize("has_states", [False, True])
def test_the_expected_speed_of_a_disk_rises_only_until_a_read_is_tried(
    tmp_path: Path, computing_s: float, has_states: bool
) -> None:
    def stage() -> Stage | None:
        return Stage() if has_states else None

    cache = Cache(tmp_path, stage=stage(), seconds=lambda start, end: 0.0)
    cache.live()
    cache.after(60)
    cache = cache.restarted(stage=stage(), seconds=lambda start, end: computing_s)
    cache.tier._bytes_per_s = 1e3
    for number in range(500):
        if cache.waits(number):
            break
        assert cache.tier.forget(number) is MissReason.DISK_SLOWER
    limit_s = computing_s * (product.LATE_PART if has_states else 1)
    assert (number < 499) == (limit_s > product.READ_LATENCY_S)
    assert cache.tier._bytes_per_s < 1e9


def test_a_slow_disk_may_go_on_while_it_saves_time(written: Cache) -> None:
    cache = written.restarted(seconds=lambda start, end: float(end - start))
    cache.workers.holds = lambda: len(cache.workers.jobs) < 2
    assert cache.waits(1)
    settle(cache.kv, cache.memory)
    cache.clock.now += TOKENS
    assert cache.waits(1), "two blocks save twice as long"
    cache.clock.now += 2 * TOKENS
    assert not cache.waits(1)
    assert cache.live() == 2 * TOKENS


def test_the_end_writes_what_is_due_and_gives_up_what_is_read(written: Cache) -> None:
    written.live([3] * 40)
    written.workers.holds = lambda: 1 in written.tier._waits
    written.tier.write_ends_now()
    settle(written.kv, written.memory)
    assert written.stats.written_bytes == 2 * BLOCK
    assert written.waits(1)
    assert written.kv.shut_down()
    assert not written.tier._running


def test_blocks_before_a_lent_one_are_in_use_as_well(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.live()
    group = full_group(cache.kv)
    sequence = CachedSequence(product.LOAN_ID, cache.hashes(IDS), 0, 0, ENDED)
    loan = group.lend(sequence, [2])
    assert loan is not None
    cache.kv.check_invariants()
    assert not join(cache.kv, 1, 6 * TOKENS), "five blocks are left"
    assert group.lend(sequence, [1]) is not None
    assert join(cache.kv, 1, 5 * TOKENS)
    group.end_loan(loan)
    settle(cache.kv, cache.memory)
    assert [block.buffers for block in group.prefixes.index._blocks.values()] == [1, 1, 0]


def test_a_loan_that_finds_no_buffer_or_mapping_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    cache.live()
    group = full_group(cache.kv)
    sequence = CachedSequence(product.LOAN_ID, cache.hashes(IDS), 0, 0, ENDED)
    with monkeypatch.context() as patch:
        patch.setattr(group.allocator, "map_shared", lambda *_: False)
        assert group.lend(sequence, [0]) is None
        patch.setattr(group.allocator, "grow", lambda *_: False)
        assert group.lend_empty(sequence, range(1)) is None
        patch.setattr(group.buffers, "take", lambda _: None)
        patch.setattr(group.allocator, "map_shared", lambda *_: pytest.fail("there is no buffer"))
        assert group.lend(sequence, [0]) is None
        assert group.lend_empty(sequence, range(1)) is None
        patch.setattr(type(group.allocator), "may_map", False)
        assert group.lend_empty(sequence, range(1)) is None
    assert group.allocator.wants_mapping_point
    cache.kv.check_invariants()
    cache.kv.evict_prefixes()
    assert group.lend_empty(sequence, range(1, 2)) is None, "the block before is not in memory"
    settle(cache.kv, cache.memory)


@pytest.mark.parametrize("reserved", [1, 3, 4, 5])
@pytest.mark.parametrize("first", [1, 2])
def test_a_read_block_is_given_up_if_others_have_reserved_the_block_before(
    tmp_path: Path, first: int, reserved: int
) -> None:
    cache = Cache(tmp_path)
    group = full_group(cache.kv)
    sequence = CachedSequence(product.LOAN_ID, cache.hashes(IDS), 0, 0, ENDED)
    loan = group.lend_empty(sequence, range(3))
    assert loan is not None
    cache.live(IDS[: first * TOKENS + 1])
    assert join(cache.kv, 1, reserved * TOKENS)
    group.adopt(loan, [first])
    assert loan.adopted == ({first} if reserved + first <= 5 else set())
    cache.kv.check_invariants()
    grow(cache.kv, 1, 0, reserved * TOKENS)
    group.end_loan(loan)
    settle(cache.kv, cache.memory)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 8])
def test_a_window_is_read_only_where_memory_and_mappings_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    cache = Cache(tmp_path, stage=Windows())
    group = full_group(cache.kv, 1)
    sequence = CachedSequence(product.LOAN_ID, cache.hashes(LONGER), 0, 0, ENDED)
    with monkeypatch.context() as patch:
        patch.setattr(type(group.allocator), "may_map", False)
        assert group.lend_empty(sequence, range(blocks)) is None
    assert group.allocator.wants_mapping_point
    lent = group.lend_empty(sequence, range(13 - blocks))
    assert lent is not None
    assert group.lend_empty(sequence, range(blocks)) is None, "a block less is free"
    group.end_loan(lent)
    settle(cache.kv, cache.memory)


def test_a_state_that_was_evicted_is_not_lent(tmp_path: Path) -> None:
    cache = Cache(tmp_path, stage=Stage())
    sequence = CachedSequence(product.LOAN_ID, cache.hashes(IDS), 0, 0, ENDED)
    assert cache.kv._groups[-1].lend(sequence, [0]) is None


@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 5])
def test_a_state_is_written_once_all_sequences_have_their_slots(
    tmp_path: Path, sequences: int
) -> None:
    cache = Cache(tmp_path, stage=Stage(num_slots=sequences * SLOTS_PER_SEQUENCE))
    cache.live()
    for number in range(sequences):
        assert join(cache.kv, number, [number] * 4)
    cache.after(60)
    assert cache.stats.held_bytes == 3 * BLOCK
    with cache.store._locked():
        cache.store._remove([*cache.store._books.records.values()])
    sequence = next(iter(cache.tier._due.values()))[1]
    cache.tier._write_later(sequence, 3, rows_only=True)
    cache.after(1)
    cache.after(1)
    assert cache.stats.held_bytes == 3 * BLOCK, "rows are written although they came later"
    cache.kv.close(0)
    cache.after(1)
    assert cache.stats.held_bytes == 3 * BLOCK + SLOT_BYTES


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
def test_a_state_that_was_evicted_alone_is_read_alone(tmp_path: Path, blocks: int) -> None:
    ids, stage = [*range(blocks * TOKENS), 3], Stage()
    cache = Cache(tmp_path, stage=stage)
    cache.live(ids)
    cache.after(60)
    for digest in cache.hashes(ids).digests:
        if (slot := stage.pool.find(digest)) is not None:
            stage.pool.forget(slot, evicted=True)
    assert cache.waits(1, ids)
    settle(cache.kv, cache.memory)
    assert not cache.waits(1, ids)
    assert cache.stats.read_bytes == SLOT_BYTES
    assert cache.live(ids) == blocks * TOKENS


def test_the_writer_looks_at_the_folder_while_it_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "REFRESH_S", 0.001)
    refreshed = Event()
    threads = workers.Workers(refreshed.set)
    assert refreshed.wait(60)
    assert threads.close(60)


@pytest.mark.parametrize("name", ["read", "write"])
def test_what_a_transfer_raises_reaches_the_engine_and_ends_no_thread(name: str) -> None:
    threads, ended = workers.Workers(lambda: None), Event()
    begin = getattr(threads, name)

    def fail() -> Callable[[], None]:
        raise RuntimeError("the device is gone")

    def end() -> Callable[[], None]:
        ended.set()
        return lambda: None

    for _ in range(2 * workers.READERS):
        begin(fail)
    begin(end)
    assert ended.wait(60)
    with pytest.raises(RuntimeError, match="the device is gone"):
        threads.run_results()
    assert threads.close(60)
