import json
from array import array

from kvcache.inspector import GroupMap, MappedSequence, letter_of
from kvcache.records import Block, BlockState
from tests.kvcache.managers import (
    BLOCK,
    HEAP_BLOCKS,
    TOKENS,
    complete_steps,
    grow,
    join,
    settle,
    small_manager,
)
from tests.kvcache.maps import expanded, map_adds_up

PROMPT = list(range(3 * TOKENS))


def test_an_empty_pool_has_its_measures_and_no_blocks() -> None:
    kv, _ = small_manager(heaps=3)
    (found,) = kv.memory_map().groups
    assert found.geometry == {
        "block_bytes": BLOCK,
        "tokens_per_block": TOKENS,
        "blocks_per_heap": HEAP_BLOCKS,
        "page_bytes": 4096,
        "regions": 2,
        "window": 0,
        "max_heaps": 3,
    }
    assert not found.heaps
    assert not found.sequences
    map_adds_up(kv.memory_map(), kv.stats())


def test_a_sequence_is_told_with_its_blocks_and_those_of_others() -> None:
    kv, backend = small_manager()
    assert join(kv, 7, PROMPT, final=60)
    grow(kv, 7, 0, len(PROMPT), PROMPT)
    complete_steps(kv)
    assert join(kv, 9, PROMPT, final=50)
    (found,) = kv.memory_map().groups
    first, second = found.sequences
    assert (first.seq_id, first.sealed_blocks, first.borrowed_blocks) == (7, 3, 0)
    # With the one that is mapped ahead.
    assert first.runs == ((0, 4),)
    # The last token is always computed: the block that it is in is not taken over.
    assert (second.seq_id, second.borrowed_blocks, second.runs) == (9, 2, ((0, 2),))
    assert found.sharers[:3].tolist() == [2, 2, 1]
    assert found.heaps[0][:3] == "sss"
    map_adds_up(kv.memory_map(), kv.stats())
    kv.close(7)
    kv.close(9)
    assert "q" in kv.memory_map().groups[0].heaps[0]
    map_adds_up(kv.memory_map(), kv.stats())
    settle(kv, backend)
    assert "c" in kv.memory_map().groups[0].heaps[0]


def test_a_map_stays_as_it_was_when_the_pool_goes_on() -> None:
    kv, _ = small_manager()
    assert join(kv, 1, 20)
    grow(kv, 1, 0, 20)
    before = kv.memory_map()
    figures = kv.stats()
    grow(kv, 1, 20, 30)
    assert kv.memory_map() != before
    map_adds_up(before, figures)


def group_map(sharers: list[int], sequences: list[MappedSequence]) -> GroupMap:
    return GroupMap({"block_bytes": 4096}, (), array("H", sharers), tuple(sequences))


def test_every_state_has_its_letter() -> None:
    dirty = [Block(0, 0, state, dirty=True) for state in BlockState]
    assert "".join(map(letter_of, [Block(0, 0), *dirty])) == "fdosqcr"


def test_a_block_belongs_to_the_first_that_has_it_and_is_marked_as_shared() -> None:
    sequences = [MappedSequence(70, ((0, 2), (5, 3))), MappedSequence(80, ((0, 3), (6, 2)))]
    found = group_map([2, 2, 1, 0, 0, 1, 3, 3], sequences)
    assert expanded(found.owner_runs()) == [0, 0, 1, -1, -1, 0, 0, 0]
    assert found.sharer_runs() == [0, 2, 2, 4, 2, 3]


def test_a_pool_without_heaps_has_no_runs() -> None:
    found = group_map([], [])
    assert not [*found.owner_runs(), *found.sharer_runs()]


def test_a_map_of_100_000_blocks_in_pieces_of_eight_is_small_on_the_wire() -> None:
    sharers = ([2] * 8 + [1] * 8) * (100_000 // 16)
    runs: list[list[tuple[int, int]]] = [[] for _ in range(256)]
    for first in range(0, len(sharers), 8):
        runs[first // 8 * 7 % 256].append((first, 8))
    found = group_map(
        sharers, [MappedSequence(n, tuple(mine)) for n, mine in enumerate(runs, 10_000)]
    )
    assert 50_000 < len(json.dumps(found.as_json(), separators=(",", ":"))) < 200_000
