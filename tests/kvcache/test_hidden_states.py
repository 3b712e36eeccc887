"""Each row of a step gets the hidden state of the token before, also from another sequence."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from kvcache.block_hashes import PrefixSalt
from kvcache.groups.hidden import MOST_STALE, HiddenGroup
from kvcache.hidden import HiddenRecord, HiddenRow, HiddenRows
from kvcache.manager import KVCacheManager
from kvcache.sequences import NO_BOUNDARIES, CachedSequence
from tests.kvcache.managers import TOKENS, join, manager, paged
from tests.kvcache.strict_memory import StrictMemory
from tests.kvcache.strict_states import STATES, StrictStates

PROMPT = list(range(1, 1 + 5 * TOKENS))


def cache(*, recurs: bool = False, shares_prefixes: bool = True) -> KVCacheManager:
    layout = paged()
    shape = replace(layout.shape, hidden_size=1, states=STATES if recurs else ())
    layout = replace(layout, shape=shape)
    states = StrictStates(24, shape.slot) if shape.slot is not None else None
    memory = StrictMemory(layout.groups[0])
    budget = 8 * layout.groups[0].heap_bytes
    return manager(
        layout, memory, budget_bytes=budget, shares_prefixes=shares_prefixes, states=states
    )


def step(
    kv: KVCacheManager, seq_id: int, ids: Sequence[int], end: int, drafts: int = 0, kept: int = 0
) -> list[int]:
    """Compute the tokens up to ``end``. The hidden state after a token is its id. Return those
    before the rows; 0 is none."""
    start = kv._open[seq_id].progress.computed
    assert kv.reserve(seq_id, end, drafts)
    views = kv.views([(seq_id, start, end - start)], {seq_id: drafts} if drafts else {})
    states = mx.array([*ids[start:end]], dtype=mx.float32)[:, None]
    if views.draft_inputs is not None:
        views.draft_inputs.add(0, [states])
    before, known = views.shift(states)
    kv.commit(seq_id, ids[start : end - drafts + kept])
    kv.step_completed(views.epoch)
    kv.check_invariants()
    return (before * known)[:, 0].astype(mx.int32).tolist()  # type: ignore[return-value]


def expected(ids: Sequence[int], start: int, end: int) -> list[int]:
    return [0, *ids][start:end]


@pytest.mark.parametrize("cut", [1, 3, 7, 16, 33, 80])
def test_a_row_has_the_hidden_state_before_it_however_a_prompt_is_cut(cut: int) -> None:
    kv = cache()
    assert join(kv, 1, PROMPT)
    for start in range(0, len(PROMPT), cut):
        end = min(start + cut, len(PROMPT))
        assert step(kv, 1, PROMPT, end) == expected(PROMPT, start, end)


@pytest.mark.parametrize("recurs", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5])
def test_a_hit_goes_on_from_the_hidden_state_at_the_end_of_the_block(
    blocks: int, recurs: bool
) -> None:
    kv = cache(recurs=recurs)
    shared = PROMPT[: blocks * TOKENS]
    assert join(kv, 1, [*shared, 7])
    step(kv, 1, [*shared, 7], len(shared) + 1)
    kv.close(1)
    kv.step_completed(kv._issued_epoch)
    other = [*shared, 8, 9]
    assert join(kv, 2, other)
    assert kv._open[2].progress.computed == len(shared)
    assert step(kv, 2, other, len(other)) == [shared[-1], 8]


@pytest.mark.parametrize("shares_prefixes", [True, False])
@pytest.mark.parametrize("length", [5, 16, 17, 31, 33, 48])
def test_a_later_answer_has_the_hidden_state_of_the_first_one(
    length: int, shares_prefixes: bool
) -> None:
    kv, ids = cache(shares_prefixes=shares_prefixes), PROMPT[:length]
    assert join(kv, 1, ids, final=length + 8)
    assert join(kv, 2, ids, final=length + 8)
    step(kv, 1, ids, length)
    step(kv, 1, [*ids, 500], length + 1)
    forked = kv.fork(1, 2)
    assert forked >= (length - 1) // TOKENS * TOKENS
    assert step(kv, 2, ids, length) == expected(ids, forked, length)


@pytest.mark.parametrize("recurs", [False, True])
@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("length", [13, 16, 30])
def test_after_drafts_comes_the_hidden_state_of_the_last_kept_one(
    length: int, kept: int, recurs: bool
) -> None:
    kv, ids = cache(recurs=recurs), PROMPT
    assert join(kv, 1, ids[:length], final=70)
    step(kv, 1, ids, length)
    drafted = [*ids[: length + 1 + kept], *[900] * (4 - kept)]
    step(kv, 1, drafted, length + 5, drafts=4, kept=kept)
    end = length + 1 + kept
    assert kv.preview([(1, end)]).hidden.first().tolist() == [[ids[end - 1]]]  # type: ignore[union-attr]
    assert step(kv, 1, ids, end + 20) == expected(ids, end, end + 20)


@pytest.mark.parametrize("recurs", [False, True])
@pytest.mark.parametrize("length", [4, 16, 20, 32, 45])
def test_a_sequence_that_is_sent_back_has_the_hidden_state_there(length: int, recurs: bool) -> None:
    kv = cache(recurs=recurs)
    assert join(kv, 1, PROMPT)
    step(kv, 1, PROMPT, length)
    assert kv.reserve(1, length + 20)
    kv.views([(1, length, 20)])
    kv.cancel_steps(1)
    back = kv._open[1].progress.computed
    assert length - TOKENS < back <= length
    assert step(kv, 1, PROMPT, length + 10) == expected(PROMPT, back, length + 10)


@pytest.mark.parametrize("ids", [[1], [2, 3], [4] * 7, [5] * 16, [6] * 40])
def test_rows_of_one_step_do_not_mix(ids: list[int]) -> None:
    kv, other = cache(), [9] * 20
    assert join(kv, 1, ids, final=60)
    assert join(kv, 2, other, final=60)
    step(kv, 1, ids, len(ids))
    step(kv, 2, other, len(other))
    assert kv.reserve(1, len(ids) + 1)
    assert kv.reserve(2, len(other) + 1)
    views = kv.views([(2, len(other), 1), (1, len(ids), 1)])
    before, _ = views.shift(mx.array([[77.0], [78.0]]))
    assert before.tolist() == [[9.0], [float(ids[-1])]]


def test_hidden_states_go_with_the_blocks_that_are_evicted() -> None:
    kv = cache()
    group = next(each for each in kv._groups if isinstance(each, HiddenGroup))
    for number in range(3 * MOST_STALE):
        ids = [number] * (TOKENS + 1)
        assert join(kv, number, ids)
        step(kv, number, ids, len(ids))
        kv.close(number)
        kv.step_completed(kv._issued_epoch)
    blocks = kv.stats().capacity_bytes // kv.stats().block_bytes
    assert 0 < len(group._cached) <= blocks + MOST_STALE


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_hidden_state_comes_back_from_a_file_with_its_dtype(
    dtype: mx.Dtype, tmp_path: Path
) -> None:
    rows = HiddenRows()
    rows.array = mx.random.normal((3, 8)).astype(dtype)
    with (tmp_path / "record").open("w+b") as file:
        checksum = HiddenRecord.of(HiddenRow(rows, 1)).write(file.fileno())
        back = HiddenRecord.empty(8)
        assert back.read(file.fileno()) == checksum
        row = back.row().rows.array
        assert row.dtype == dtype
        assert mx.array_equal(row[0], rows.array[1])
        file.truncate(9)
        with pytest.raises(OSError, match="Input/output"):
            back.read(file.fileno())


@pytest.mark.parametrize("number", range(5))
def test_a_hidden_state_from_a_file_is_shared_once_a_prompt_can_begin_there(
    number: int, tmp_path: Path
) -> None:
    cached = set[bytes]()
    group, rows = HiddenGroup(TOKENS, 1, cached.__contains__), HiddenRows()
    rows.array = mx.array([[2.5]])
    hashes = cache().block_hashes(PrefixSalt())
    hashes.extend(PROMPT, 0)
    sequence = CachedSequence(-1, hashes, 0, 0, NO_BOUNDARIES)
    loan = group.lend_empty(sequence, range(number, number + 1))
    assert loan is not None
    with (tmp_path / "record").open("w+b") as file:
        checksum = HiddenRecord.of(HiddenRow(rows, 0)).write(file.fileno())
        assert loan.read(number, file.fileno()) == checksum
    group.adopt(loan, [number])
    assert not group.has(hashes, number), "its block is not cached"
    assert not loan.adopted
    cached.add(hashes.digests[number])
    group._cached.update((bytes([stale]), HiddenRow(rows, 0)) for stale in range(MOST_STALE))
    group.adopt(loan, [number])
    assert group.has(hashes, number)
    assert loan.adopted == {number}
    group.check_invariants()
    group._cached[hashes.digests[number]] = HiddenRow(HiddenRows(), 0)  # of one that has failed
    group.adopt(loan, [number])
    assert group._cached[hashes.digests[number]].rows.array.item() == 2.5
    cached.clear()
    assert not group.has(hashes, number), "its block was evicted, or may be wrong"


def test_a_hidden_state_on_a_full_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 3)
    with (tmp_path / "record").open("w+b") as file, pytest.raises(OSError, match="No space"):
        HiddenRecord.empty(8).write(file.fileno())
