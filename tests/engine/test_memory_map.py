"""The engine's memory map, taken while it works."""

import asyncio
import json
import threading
from array import array

import pytest

from engine.memory_map import MAX_SHOWN_SEQUENCES, MemoryMap
from engine.messages import GetMemoryMap, Stop
from engine.step.loop import EngineLoop
from engine.types import EngineDeadError, EngineStats, MissReason, SamplingParams
from kvcache.inspector import GroupMap, KVMap, MappedSequence
from tests.engines import Answers, greedy, recall_client, recall_loop, request_of, steps
from tests.kvcache.maps import expanded, map_adds_up

WAIT_S = 10.0


def add_map(loop: EngineLoop, found: list[MemoryMap]) -> None:
    loop.mailbox.put(GetMemoryMap(found.append))


def test_under_load_every_map_agrees_with_its_figures() -> None:
    loop = recall_loop(Answers.empty(), kv_budget_bytes=40 * 4 * 4096)
    for number in range(1, 30):
        loop.mailbox.put(greedy(number, list(range(40)) + [number] * number, 20))
    found: list[MemoryMap] = []
    add_map(loop, found)
    for _ in steps(loop):
        add_map(loop, found)
    assert len(found) > 20
    for one in found:
        assert one.stats.kv is not None
        map_adds_up(one.kv, one.stats.kv)
        assert [report["id"] for report in one.running] == sorted(
            sequence.seq_id for sequence in one.kv.groups[0].sequences
        )
    assert any(sequence.borrowed_blocks for one in found for sequence in one.kv.groups[0].sequences)
    assert any(one.waiting for one in found)
    loop.close()


def test_a_report_counts_tokens() -> None:
    loop = recall_loop(Answers.empty())
    loop.mailbox.put(greedy(5, list(range(10)), 30))
    for _ in range(6):  # three steps, each begun, then read
        loop.run_once()
    found: list[MemoryMap] = []
    add_map(loop, found)
    loop.run_once()
    (report,) = found[0].running
    assert (report["id"], report["status"], report["preemptions"]) == (5, "running", 0)
    assert (report["prompt_tokens"], report["tokens"], report["most_tokens"]) == (10, 13, 40)
    assert report["computed_tokens"] == 12
    loop.close()


def test_of_many_that_wait_the_first_ones_are_told() -> None:
    loop = recall_loop(Answers.empty(), max_num_seqs=1)
    for number in range(1, MAX_SHOWN_SEQUENCES + 10):
        loop.mailbox.put(request_of(number, (1, 2), SamplingParams(2)))
    found: list[MemoryMap] = []
    add_map(loop, found)
    loop.run_once()
    (only,) = found
    assert only.stats.waiting == MAX_SHOWN_SEQUENCES + 9
    assert [report["id"] for report in only.waiting] == list(range(1, MAX_SHOWN_SEQUENCES + 1))
    loop.close()


def test_a_map_of_an_engine_at_work_is_told_as_it_is() -> None:
    loop = recall_loop(Answers.empty(), max_num_seqs=3)
    for number in range(1, 6):
        loop.mailbox.put(greedy(number, list(range(40)), 30))
    found: list[MemoryMap] = []
    for _ in range(6):
        loop.run_once()
    loop.mailbox.put(GetMemoryMap(found.append))
    loop.run_once()
    told = json.loads(json.dumps(found[0].as_json()))
    assert told["pool"]["num_heaps"] == len(told["heaps"])
    assert [s["id"] for s in told["sequences"]] == [1, 2, 3, 4, 5]
    assert [s["status"] for s in told["sequences"]] == ["running"] * 3 + ["waiting"] * 2
    assert [s["mapped_blocks"] > 0 for s in told["sequences"]] == [True] * 3 + [False] * 2
    assert told["owner_ids"] == [1, 2, 3]
    assert (told["running"], told["waiting"]) == (3, 2)
    assert told["misses"].keys() == {reason.value for reason in MissReason}
    miss = {"count": 1, "message": MissReason.NEVER_CACHED.message}
    assert told["misses"]["never_cached"] == miss, "the others share the first one's prompt"
    letters = "".join(told["heaps"])
    owners = expanded(told["owners"])
    assert len(letters) == len(owners)
    assert all(
        (owner >= 0) == (letter in "os") for owner, letter in zip(owners, letters, strict=True)
    )
    shared = sum(told["sharers"][1::3])
    runs = zip(told["sharers"][1::3], told["sharers"][2::3], strict=True)
    saved = sum(count * (sequences - 1) for count, sequences in runs)
    assert shared == 2
    assert told["shared_saved_bytes"] == saved * told["geometry"]["block_bytes"]
    loop.close()


async def test_an_idle_engine_answers_who_looks() -> None:
    client = recall_client()
    client.attach()
    found = await client.memory_map()
    assert found.running == found.waiting == ()
    assert client.stop(WAIT_S)
    with pytest.raises(EngineDeadError):
        await client.memory_map()


async def test_who_has_left_is_not_answered() -> None:
    client = recall_client()
    client.attach()
    left = asyncio.ensure_future(client.memory_map())
    await asyncio.sleep(0)
    left.cancel()
    assert (await client.memory_map()).stats.kv is not None
    assert left.cancelled()
    assert client.stop(WAIT_S)


async def test_an_answer_that_came_just_before_the_end_stays() -> None:
    client = recall_client()
    client.attach()
    found = await client.memory_map()
    looking = asyncio.ensure_future(client.memory_map())
    await asyncio.sleep(0)
    (future,) = client._requested_maps
    future.set_result(found)
    client._fail_all("the engine has ended")
    assert await looking is found
    assert client.stop(WAIT_S)


async def test_who_looks_while_the_engine_ends_is_told() -> None:
    client = recall_client()
    client.attach()
    entered, go_on = threading.Event(), threading.Event()

    def hold(_: MemoryMap) -> None:
        entered.set()
        assert go_on.wait(WAIT_S)

    assert client._loop is not None
    client._loop.mailbox.put(GetMemoryMap(hold))
    assert entered.wait(WAIT_S)
    client._loop.mailbox.put(Stop())
    # The loop has been told to stop; what comes behind that in its mailbox it still reads, so the
    # question is kept out of it.
    client._loop.mailbox, kept = type(client._loop.mailbox)(), client._loop.mailbox
    looking = asyncio.ensure_future(client.memory_map())
    left = asyncio.ensure_future(client.memory_map())
    await asyncio.sleep(0)
    left.cancel()
    client._loop.mailbox = kept
    go_on.set()
    with pytest.raises(EngineDeadError):
        await looking
    with pytest.raises(asyncio.CancelledError):
        await left
    assert client.stop(WAIT_S)


def test_a_sequence_is_told_with_its_blocks_in_every_group_of_layers() -> None:
    full, window = MappedSequence(1, ((0, 5),), 0, 5, 3), MappedSequence(1, ((8, 2), (3, 1)), 2, 3)
    kv_map = KVMap([GroupMap({}, (), array("H"), (own,)) for own in (full, window)])
    told = MemoryMap(EngineStats(), kv_map, ({"id": 1},), ({"id": 2},)).as_json()["sequences"]
    names = ("first_block", "mapped_blocks", "sealed_blocks", "borrowed_blocks")

    def blocks(*numbers: int) -> dict[str, int]:
        return dict(zip(names, numbers, strict=True))

    assert told == [
        {"id": 1} | blocks(0, 5, 5, 3) | {"other_groups": [blocks(2, 3, 3, 0)]},
        {"id": 2} | blocks(0, 0, 0, 0) | {"other_groups": [blocks(0, 0, 0, 0)]},
    ]
