"""What GET /memory says of blocks and sequences, read back."""

import asyncio
import json
from array import array
from typing import cast

from engine.client import EngineClient
from engine.errors import EngineDeadError
from engine.memory_map import KVMap, MemoryMap
from engine.messages import GetMemoryMap
from engine.types import EngineStats
from kvcache.memory_map import BlockRun, BlockState, HeapSnapshot, MappedSequence
from server.metrics.memory_map import (
    MAX_AGE_S,
    MemoryMapCache,
    encoded,
    heap_letters,
    owner_runs,
    sharer_runs,
    view,
)
from tests.engines import Answers, greedy, recall_loop

FREE, OWNED, SEALED, QUARANTINED, CACHED, RELEASING = BlockState
BLOCKS = 100_000
PER_HEAP = 64


def heap(states: list[BlockState], dirty: list[int], sharers: list[int]) -> HeapSnapshot:
    return HeapSnapshot(bytes(states), bytes(dirty), array("H", sharers).tobytes())


def sequence(number: int, *runs: tuple[int, int, int]) -> MappedSequence:
    blocks = sum(count for *_, count in runs)
    return MappedSequence(number, tuple(BlockRun(*run) for run in runs), blocks, blocks, 0)


def kv_map(heaps: list[HeapSnapshot], sequences: list[MappedSequence], per_heap: int) -> KVMap:
    return KVMap(4096, 16, per_heap, 1024, 4, len(heaps) + 1, tuple(heaps), tuple(sequences))


def expanded(runs: list[int]) -> list[int]:
    """As the page reads ``owners``."""
    pairs = zip(runs[::2], runs[1::2], strict=True)
    return [owner for owner, count in pairs for _ in range(count)]


def test_every_state_has_its_letter() -> None:
    states = [FREE, FREE, OWNED, SEALED, QUARANTINED, CACHED, RELEASING]
    dirty = [0, 1, 1, 1, 1, 1, 1]
    found = kv_map([heap(states, dirty, [0] * 7), heap([FREE] * 7, [0] * 7, [0] * 7)], [], 7)
    assert heap_letters(found) == ["fdosqcr", "fffffff"]


def test_a_block_belongs_to_the_first_that_has_it_and_is_marked_as_shared() -> None:
    heaps = [heap([SEALED] * 4, [1] * 4, [2, 2, 1, 0]), heap([OWNED] * 4, [1] * 4, [0, 1, 3, 3])]
    sequences = [sequence(70, (0, 0, 2), (1, 1, 3)), sequence(80, (0, 0, 3), (1, 2, 2))]
    found = kv_map(heaps, sequences, 4)
    assert expanded(owner_runs(found)) == [0, 0, 1, -1, -1, 0, 0, 0]
    assert sharer_runs(found) == [0, 2, 2, 4, 2, 3]


def test_a_pool_without_heaps_has_no_runs() -> None:
    found = kv_map([], [], 4)
    assert not [*heap_letters(found), *owner_runs(found), *sharer_runs(found)]


def big_pool() -> MemoryMap:
    """100 000 blocks of 256 sequences, all in pieces of 8 blocks that lie between each other's, and
    every second piece shared."""
    sharers = ([2] * 8 + [1] * 8) * (PER_HEAP // 16)
    heaps = [heap([SEALED] * PER_HEAP, [1] * PER_HEAP, sharers)] * (BLOCKS // PER_HEAP)
    runs: list[list[tuple[int, int, int]]] = [[] for _ in range(256)]
    for place in range(0, len(heaps) * PER_HEAP, 8):
        runs[place // 8 * 7 % 256].append((place // PER_HEAP, place % PER_HEAP, 8))
    sequences = [sequence(10_000 + n, *mine) for n, mine in enumerate(runs)]
    return MemoryMap(EngineStats(), kv_map(heaps, sequences, PER_HEAP), (), ())


def test_a_big_pool_is_small_on_the_wire() -> None:
    assert 100_000 < len(encoded(big_pool())) < 300_000


def test_a_map_of_an_engine_at_work_is_told_as_it_is() -> None:
    loop = recall_loop(Answers.empty(), max_num_seqs=3)
    for number in range(1, 6):
        loop.mailbox.put(greedy(number, list(range(40)), 30))
    found: list[MemoryMap] = []
    for _ in range(6):
        loop.run_once()
    loop.mailbox.put(GetMemoryMap(found.append))
    loop.run_once()
    told = json.loads(encoded(found[0]))
    assert told == json.loads(json.dumps(view(found[0])))
    assert told["pool"]["num_heaps"] == len(told["heaps"])
    assert [s["id"] for s in told["sequences"]] == [1, 2, 3, 4, 5]
    assert [s["status"] for s in told["sequences"]] == ["running"] * 3 + ["waiting"] * 2
    assert [s["mapped_blocks"] > 0 for s in told["sequences"]] == [True] * 3 + [False] * 2
    assert told["owner_ids"] == [1, 2, 3]
    assert (told["running"], told["waiting"]) == (3, 2)
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


# --- the newest map ---------------------------------------------------------------------------


class AskedClient:
    """Answers when it is told to."""

    alive = True

    def __init__(self) -> None:
        self.questions: list[asyncio.Future[MemoryMap]] = []

    async def memory_map(self) -> MemoryMap:
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]

    def answer(self, steps: int) -> None:
        kv = KVMap(4096, 16, 4, 1024, 4, 1, (), ())
        self.questions[-1].set_result(MemoryMap(EngineStats(steps=steps), kv, (), ()))


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def caching(wait_s: float = 60.0) -> tuple[AskedClient, Clock, MemoryMapCache]:
    client, clock = AskedClient(), Clock()
    cache = MemoryMapCache(cast(EngineClient, client), wait_s=wait_s, clock=clock)
    return client, clock, cache


async def asked(client: AskedClient, times: int) -> None:
    """Until the engine has been asked so often."""
    while len(client.questions) < times:
        await asyncio.sleep(0)


def steps(seen: tuple[bytes, float] | None) -> int:
    assert seen is not None
    return int(json.loads(seen[0])["steps"])


async def test_many_who_look_at_once_ask_the_engine_once() -> None:
    client, _, cache = caching()
    lookups = [asyncio.ensure_future(cache.get()) for _ in range(5)]
    await asked(client, 1)
    client.answer(steps=3)
    seen = await asyncio.gather(*lookups)
    assert [steps(one) for one in seen] == [3] * 5
    assert len({id(one[0]) for one in seen if one is not None}) == 1, "encoded once"
    assert len(client.questions) == 1


async def test_a_young_map_is_shown_again_and_an_older_one_is_not() -> None:
    client, clock, cache = caching()
    lookup = asyncio.ensure_future(cache.get())
    await asked(client, 1)
    client.answer(steps=1)
    await lookup
    clock.now += MAX_AGE_S * 0.9
    seen = await cache.get()
    assert steps(seen) == 1
    assert seen is not None
    assert abs(seen[1] - MAX_AGE_S * 0.9) < 1e-9
    clock.now += MAX_AGE_S * 0.2
    lookup = asyncio.ensure_future(cache.get())
    await asked(client, 2)
    client.answer(steps=2)
    assert steps(await lookup) == 2


async def test_an_engine_that_does_not_answer_is_asked_only_once() -> None:
    client, clock, cache = caching(wait_s=0.001)
    assert await cache.get() is None
    assert await cache.get() is None
    assert len(client.questions) == 1
    client.answer(steps=7)
    while await cache.get() is None:
        pass
    clock.now += 12.0
    seen = await cache.get()
    assert len(client.questions) == 2
    assert seen is not None
    assert (steps(seen), seen[1]) == (7, 12.0)
    client.questions[-1].set_exception(EngineDeadError())
    await asyncio.sleep(0)


async def test_of_an_engine_that_has_ended_the_last_map_is_shown_with_its_age() -> None:
    client, clock, cache = caching()
    lookup = asyncio.ensure_future(cache.get())
    await asked(client, 1)
    client.answer(steps=4)
    await lookup
    clock.now += 1
    lookup = asyncio.ensure_future(cache.get())
    await asked(client, 2)
    client.questions[-1].set_exception(EngineDeadError())
    seen = await lookup
    assert seen is not None
    assert (steps(seen), seen[1]) == (4, 1.0)
    client.alive = False
    clock.now += 1
    assert await cache.get() == (seen[0], 2.0)
    assert len(client.questions) == 2
