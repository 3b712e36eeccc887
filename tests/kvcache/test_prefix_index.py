import pytest

from kvcache import evictor, prefixes
from kvcache.block_hashes import BlockHashes, PrefixSalt
from kvcache.evictor import UseClock
from kvcache.prefixes import PrefixIndex
from kvcache.records import Block, BlockState
from kvcache.stats import MissReason

SIZE = 4


def hashes_of(tokens: list[int], salt: PrefixSalt | None = None) -> BlockHashes:
    hashes = BlockHashes(b"model", salt or PrefixSalt(), SIZE)
    hashes.extend(tokens, 0)
    return hashes


class Cache:
    """An index, and blocks that are numbered as they come."""

    def __init__(self) -> None:
        self.clock = UseClock()
        self.index = PrefixIndex(self.clock)
        self.blocks = 0

    def keep(self, hashes: BlockHashes, *, system: int = 0, idle: bool = True) -> list[Block]:
        """Inserts the blocks that are not there, and lets all of them rest."""
        self.clock.tick()
        mine = []
        for number in range(len(hashes.digests)):
            block = self.index.find(hashes, number)
            if block is None:
                self.blocks += 1
                block = Block(0, self.blocks)
                self.index.insert(hashes, number, block, number < system)
            else:
                self.index.use(block, number < system)
            block.state = BlockState.SEALED
            mine.append(block)
        for block in mine if idle else []:
            self.rest(block)
        self.index.check_invariants()
        return mine

    def rest(self, block: Block) -> None:
        """No buffer maps the block any more."""
        block.state = BlockState.CACHED
        self.index.note_cached(block)

    def evict_all(self) -> list[Block]:
        gone = []
        while (block := self.index.evict()) is not None:
            gone.append(block)
            self.index.check_invariants()
        return gone


def test_a_block_is_found_by_its_whole_past() -> None:
    cache = Cache()
    first, second = cache.keep(hashes_of(list(range(8))))
    found = [cache.index.find(hashes_of(list(range(8))), number) for number in (0, 1)]
    assert found == [first, second]
    assert cache.index.find(hashes_of([9, 1, 2, 3, 4, 5, 6, 7]), 1) is None
    assert len(cache.index) == 2


def test_token_ids_are_compared_even_when_digests_are_equal() -> None:
    cache = Cache()
    cache.keep(hashes_of([1, 2, 3, 4]))
    forged = hashes_of([1, 2, 3, 4])
    forged.tokens[0] = hashes_of([5, 6, 7, 8]).tokens[0]
    assert cache.index.find(forged, 0) is None


def test_leaves_are_evicted_before_their_parents() -> None:
    cache = Cache()
    first, second = cache.keep(hashes_of([1] * 8))
    third = cache.keep(hashes_of([1] * 4 + [2] * 4))[1]
    assert cache.evict_all() == [second, third, first]


def test_the_leaf_that_was_not_used_for_longest_goes_first() -> None:
    cache = Cache()
    prompts = [hashes_of([number] * 4) for number in range(3)]
    blocks = [cache.keep(hashes)[0] for hashes in prompts]
    cache.keep(prompts[0])
    assert cache.evict_all() == [blocks[1], blocks[2], blocks[0]]


def test_blocks_in_use_are_not_evicted_nor_are_their_parents() -> None:
    cache = Cache()
    cache.keep(hashes_of([1] * 8), idle=False)
    assert cache.index.evict() is None


def test_system_prompts_outlive_conversations() -> None:
    cache = Cache()
    system = hashes_of([1] * 4)
    (kept,) = cache.keep(system, system=1)
    tails = [cache.keep(hashes_of([number] * 4))[0] for number in range(2, 5)]
    assert cache.evict_all() == [*tails, kept]


def test_system_prompts_are_no_more_than_half_of_what_is_kept() -> None:
    cache = Cache()
    systems = [cache.keep(hashes_of([number] * 4), system=1)[0] for number in range(3)]
    (tail,) = cache.keep(hashes_of([9] * 4))
    assert cache.evict_all() == [systems[0], systems[1], tail, systems[2]]


def test_a_block_joins_a_system_prompt_when_it_is_used_as_one() -> None:
    cache = Cache()
    hashes = hashes_of([1] * 4)
    (block,) = cache.keep(hashes)
    cache.keep(hashes, system=1)
    (tail,) = cache.keep(hashes_of([2] * 4))
    assert cache.evict_all() == [tail, block]


def test_a_block_that_was_computed_again_takes_the_place_of_its_idle_equal() -> None:
    cache = Cache()
    hashes = hashes_of([1] * 8)
    first, second = cache.keep(hashes)
    again = Block(7, 7, BlockState.SEALED)
    cache.index.replace(first, again, spared=True)
    assert first.prefix is None
    assert cache.index.find(hashes, 0) is again
    cache.rest(again)
    cache.index.check_invariants()
    assert again.found_by.spared
    assert cache.evict_all() == [second, again]


def test_what_is_in_doubt_is_forgotten_with_all_that_follows() -> None:
    cache = Cache()
    hashes = hashes_of([1] * 8)
    second = cache.keep(hashes)[1]
    third = cache.keep(hashes_of([1] * 4 + [2] * 4), idle=False)[1]
    assert cache.index.invalidate(hashes, 1) == [second]
    assert cache.index.invalidate(hashes, 0) == []
    assert third.prefix is None
    assert len(cache.index) == 0
    cache.index.check_invariants()


def test_the_queue_of_leaves_does_not_grow_with_their_uses() -> None:
    cache = Cache()
    prompts = [hashes_of([number] * 4) for number in range(3)]
    for _ in range(200):
        for hashes in prompts:
            cache.keep(hashes)
    assert len(cache.index._queues[False]) <= 2 * 3 + prefixes.STALE_QUEUE_ENTRIES + 1
    assert len(cache.evict_all()) == 3


# --- why not -------------------------------------------------------------------------------------


def test_a_prompt_that_nobody_sent_was_never_cached() -> None:
    assert Cache().index.explain(hashes_of([1] * 9), 0) == (0, MissReason.NEVER_CACHED)


def test_the_token_at_which_a_prompt_leaves_what_is_cached_is_exact() -> None:
    cache = Cache()
    for last in (5, 50, 70):
        cache.keep(hashes_of([1, 2, 3, 4, 5, 6, last, 8]))
    left = hashes_of([1, 2, 3, 4, 5, 6, 60, 8, 9])
    assert cache.index.explain(left, 1) == (6, MissReason.NEVER_CACHED)
    left = hashes_of([1, 2, 3, 4, 5, 6, 70, 9, 9])
    assert cache.index.explain(left, 1) == (7, MissReason.NEVER_CACHED)


def test_nothing_is_missed_where_no_full_block_is_left() -> None:
    cache = Cache()
    cache.keep(hashes_of([1] * 8))
    assert cache.index.explain(hashes_of([1] * 10), 2) == (8, None)
    assert cache.index.explain(hashes_of([1] * 8), 1) == (8, None), "the last token is computed"
    assert cache.index.explain(hashes_of([1] * 6), 1) == (6, None), "the rest is no full block"


def test_an_evicted_block_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictor, "REMEMBERED_EVICTIONS", 1)
    cache = Cache()
    for number in (1, 2):
        cache.keep(hashes_of([number] * 4))
    cache.evict_all()
    assert cache.index.explain(hashes_of([1] * 5), 0) == (0, MissReason.NEVER_CACHED), "long ago"
    assert cache.index.explain(hashes_of([2] * 5), 0) == (0, MissReason.EVICTED)
    cache.keep(hashes_of([2] * 4))
    assert cache.index.explain(hashes_of([2] * 4 + [3] * 5), 1) == (4, MissReason.NEVER_CACHED)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (PrefixSalt(b"key", b"mine"), PrefixSalt(b"key", b"theirs")),
        (PrefixSalt(b"key"), PrefixSalt(b"key", b"theirs")),
        (PrefixSalt(b"key", b"mine"), PrefixSalt(b"key")),
        (PrefixSalt(client=b"mine"), PrefixSalt(client=b"theirs")),
        (PrefixSalt(), PrefixSalt(client=b"theirs")),
        (PrefixSalt(b"key", b"salt"), PrefixSalt(b"stranger", b"salt")),
    ],
)
def test_why_a_prompt_is_not_cached_says_nothing_of_what_others_have_cached(
    mine: PrefixSalt, theirs: PrefixSalt
) -> None:
    ids = list(range(12))
    cache, empty = Cache(), Cache()
    cache.keep(hashes_of(ids, theirs))
    for known in (4, 8):
        for one in (cache, empty):
            one.keep(hashes_of(ids[:known], mine))
        for guess in (ids, [*ids[:-1], 99], [*ids[:known], *[99] * 5], ids[: known + 1]):
            hashes = hashes_of(guess, mine)
            assert cache.index.explain(hashes, 0) == empty.index.explain(hashes, 0), guess
    cache.evict_all()
    assert cache.index.explain(hashes_of(ids[:5], mine), 0)[1] is MissReason.EVICTED
    assert cache.index.explain(hashes_of(ids, theirs), 0)[1] is MissReason.EVICTED
