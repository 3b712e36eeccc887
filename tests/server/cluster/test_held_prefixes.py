"""Which replicas hold which prefixes."""

from random import Random

from server.cluster.held_prefixes import HeldPrefixes

A, B, C, D = (letter.encode() for letter in "abcd")
ALL = 0b1111


def found(held: HeldPrefixes, *hashes: bytes, among: int = ALL) -> list[tuple[int, int]]:
    return held.find(hashes, among)


def test_nothing_is_found_of_a_prompt_that_nobody_holds() -> None:
    held = HeldPrefixes(8)
    assert found(held) == found(held, A, B) == []
    held.add([A], 0)
    assert found(held) == found(held, B) == []


def test_each_replica_is_found_with_what_it_holds_of_the_beginning() -> None:
    held = HeldPrefixes(8)
    held.add([A], 0)
    held.add([A, B], 1)
    held.add([A, B, C], 2)
    assert found(held, A, B, C, D) == [(1, 0b111), (2, 0b110), (3, 0b100)]
    assert found(held, A, B) == [(1, 0b111), (2, 0b110)]
    assert found(held, A, B, D, among=0b011) == [(1, 0b011), (2, 0b010)]


def test_what_stands_behind_a_gap_does_not_count() -> None:
    held = HeldPrefixes(8)
    held.add([A, B, C], 0)
    held.discard([B], 0)
    assert found(held, A, B, C) == [(1, 1)]
    held.add([A, B], 0)
    assert found(held, A, B, C) == [(3, 1)]


def test_what_one_replica_evicts_others_keep() -> None:
    held = HeldPrefixes(8)
    held.add([A, B], 0)
    held.add([A, B], 1)
    held.discard([B, A, D], 0)
    assert found(held, A, B) == [(2, 0b10)]
    held.discard([A, B], 1)
    assert len(held) == 0


def test_a_replica_is_forgotten_and_nobody_else() -> None:
    held = HeldPrefixes(8)
    held.add([A, B], 0)
    held.add([A, C], 1)
    held.add([D], 2)
    held.forget(0b101)
    assert found(held, A, B) == [(1, 0b10)]
    assert found(held, A, C) == [(2, 0b10)]
    assert found(held, D) == []
    assert len(held) == 2


def test_the_least_recently_used_hashes_are_forgotten_beyond_the_limit() -> None:
    held = HeldPrefixes(3)
    held.add([A, B], 0)
    held.add([C], 0)
    held.add([A], 1)
    held.add([D], 0)
    assert len(held) == 3
    # B, the end of the oldest prompt.
    assert found(held, A, B) == [(1, 0b11)]
    assert found(held, C) == found(held, D) == [(1, 1)]


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    held = HeldPrefixes(2)
    held.add([A, B, C, D], 0)
    assert found(held, A, B, C, D) == [(2, 1)]


def test_prompts_of_many_replicas_share_the_numbers_that_stand_for_them() -> None:
    held = HeldPrefixes(8)
    for replica in range(1000):
        held.add([A, B, C], replica)
    assert found(held, A, B, C, among=1 << 1000) == []
    assert found(held, A, B, C, among=2**1000 - 1) == [(3, 2**1000 - 1)]
    masks = held._masks
    assert masks[A] is masks[B] is masks[C]


def test_it_finds_what_one_set_for_each_replica_finds() -> None:
    random = Random(0)
    held, sets = HeldPrefixes(10_000), [set[bytes]() for _ in range(4)]
    prompts = [
        [b"%d" % (number % 3), *(b"%d %d" % (number, i) for i in range(5))] for number in range(9)
    ]
    for _ in range(2000):
        prompt, replica = random.choice(prompts), random.randrange(4)
        part = prompt[: random.randrange(7)]
        if random.random() < 0.5:
            held.add(part, replica)
            sets[replica].update(part)
        else:
            held.discard(part[2:], replica)
            sets[replica].difference_update(part[2:])
        lengths = [
            next((i for i, its in enumerate(prompt) if its not in its_set), len(prompt))
            for its_set in sets
        ]
        levels = held.find(prompt, ALL)
        for number, length in enumerate(lengths):
            assert max((n for n, mask in levels if mask >> number & 1), default=0) == length
        assert len(held) == len(set().union(*sets))
