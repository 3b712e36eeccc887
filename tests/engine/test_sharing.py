"""Who takes over what, and who waits for whom; whole engines are in test_shared_prefixes.py."""

from dataclasses import dataclass, field
from typing import cast

from engine.step.scheduler import Sharing
from engine.step.sequence import Sequence, SequenceStatus
from engine.types import SamplingParams
from kvcache.manager import KVCacheManager
from tests.engine.step.test_scheduler import CountingKV
from tests.engines import request_of


@dataclass
class SharingKV(CountingKV):
    """A cache in which others have computed some tokens of everybody."""

    owners: dict[int, int] = field(default_factory=dict)
    """Owners of pending prefixes, by the sequence that waits."""
    attached: list[int] = field(default_factory=list)
    forked: list[tuple[int, int]] = field(default_factory=list)

    def attach_cached(self, seq_id: int) -> int:
        self.attached.append(seq_id)
        self.progress[seq_id].restart_at(4)
        return 4

    def fork(self, seq_id: int, child_id: int) -> int:
        self.forked.append((seq_id, child_id))
        return 0

    def pending_owner(self, seq_id: int) -> int | None:
        return self.owners.get(seq_id)


def sequence(number: int, *, first: int | None = None, running: bool = True) -> Sequence:
    """first: the id of the request's first answer, if it is not this one."""
    params = [SamplingParams(8, temperature=0.0)] * 2
    found = Sequence(request_of(first or number, range(10), *params), number, number, 18)
    found.status = SequenceStatus.RUNNING if running else SequenceStatus.WAITING
    return found


def together(*sequences: Sequence) -> tuple[Sharing, SharingKV]:
    kv = SharingKV(100, progress={s.seq_id: s.progress for s in sequences})
    return Sharing(cast(KVCacheManager, kv), {s.seq_id: s for s in sequences}), kv


def test_what_others_have_computed_is_taken_over_but_not_by_one_in_flight() -> None:
    idle, flying = sequence(1), sequence(2)
    flying.progress.scheduled = 2
    sharing, kv = together(idle, flying)
    sharing.attach_cached([idle, flying], in_parts=True)
    assert kv.attached == [1]
    assert (idle.num_computed, idle.num_scheduled) == (4, 4)
    assert (flying.num_computed, flying.num_scheduled) == (0, 2)


def test_who_waits_for_another_takes_all_at_once_unless_somebody_waits() -> None:
    first, second = sequence(1), sequence(2)
    sharing, kv = together(first, second)
    kv.owners = {2: 1, 1: 2}
    assert sharing.waits_for_owner(second)
    assert not sharing.waits_for_owner(first), "it is before the other one in order"
    sharing.attach_cached([second], in_parts=False)
    assert kv.attached == []
    sharing.attach_cached([second], in_parts=True)
    assert kv.attached == [2]


def test_a_fork_takes_its_parents_pages_when_the_parent_has_committed_them() -> None:
    parent, child = sequence(1), sequence(2, first=1)
    sharing, kv = together(parent, child)
    parent.progress.scheduled = 10
    assert sharing.waits_for_parent(child), "scheduled is not computed"
    parent.progress.computed = 10
    assert not sharing.waits_for_parent(child)
    sharing.attach_cached([child], in_parts=False)
    assert kv.forked == [(1, 2)]


def test_a_fork_of_one_without_memory_or_of_nobody_is_like_any_other() -> None:
    waiting, child, orphan = sequence(1, running=False), sequence(2, first=1), sequence(3)
    sharing, kv = together(waiting, child, orphan)
    assert not sharing.waits_for_parent(child)
    assert not sharing.waits_for_parent(orphan)
    sharing.attach_cached([child, orphan], in_parts=False)
    assert kv.forked == []


def test_memory_is_asked_for_what_a_sequence_has_and_one_token_more() -> None:
    one = sequence(1)
    sharing, kv = together(one)
    assert sharing.open(one)
    hashes = one.block_hashes
    assert hashes is not None
    assert hashes.num_tokens == 10
    kv.close(1, keep_prefix=False)
    kv.blocks = 0
    assert not sharing.open(one)
    assert one.block_hashes is hashes, "kept for the next time"
