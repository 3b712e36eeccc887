"""Which replicas keep which states."""

import math
from random import Random

from server.cluster.held_states import REPORTS_AWAITED, HeldStates

A, B, C, D = (letter.encode() for letter in "abcd")
ALL = 0b1111


def found(held: HeldStates, *hashes: bytes, among: int = ALL) -> list[tuple[int, int]]:
    return held.find(hashes, among)


def test_a_replica_is_found_with_its_latest_state_and_nothing_counts_between_states() -> None:
    held = HeldStates(8)
    assert found(held) == found(held, A, B) == []
    held.report([A, C], 0, 1)
    held.report([B], 1, 1)
    held.report([A], 2, 1)
    assert found(held, A, B, C, D) == [(1, 0b111), (2, 0b011), (3, 0b001)]
    assert found(held, A, B) == [(1, 0b111), (2, 0b010)]
    assert found(held, A, B, C, among=0b110) == [(1, 0b110), (2, 0b010)]
    assert found(held, D, B) == [(2, 0b010)], "blocks before a state are held where it is"


def test_a_report_replaces_the_one_before_and_late_ones_say_nothing() -> None:
    held = HeldStates(8)
    held.report([A, B], 0, 2)
    held.report([A, D], 0, 1)
    held.report([D], 0, 2)
    assert found(held, A, B) == [(2, 1)]
    assert found(held, A) == [(1, 1)]
    held.report([A], 0, 3)
    assert found(held, A, B) == [(1, 1)]
    held.report([], 0, 4)
    assert found(held, A, B) == []
    assert len(held) == 0


def test_what_is_expected_stays_until_it_is_there_and_then_for_some_reports() -> None:
    held = HeldStates(8)
    held.expect([A, B], 0)
    for number in range(1, 10):
        held.report([], 0, number)
    assert found(held, A, B) == [(2, 1)]
    held.add([A, B], 0)
    for number in range(10, 9 + REPORTS_AWAITED):
        held.report([A], 0, number)
        assert found(held, A, B) == [(2, 1)]
    held.report([A], 0, 9 + REPORTS_AWAITED)
    assert found(held, A, B) == [(1, 1)], "it was expected, and never came"


def test_what_was_reported_is_gone_with_the_first_report_without_it() -> None:
    held = HeldStates(8)
    held.add([A], 0)
    held.report([A], 0, REPORTS_AWAITED)
    assert found(held, A) == [(1, 1)]
    held.report([], 0, REPORTS_AWAITED + 1)
    assert found(held, A) == []


def test_what_does_not_come_to_pass_is_taken_back() -> None:
    held = HeldStates(8)
    held.expect([A], 0)
    held.expect([A], 1)
    held.discard([A, D], 0)
    held.discard([A], 3)
    assert found(held, A) == [(1, 0b10)]


def test_a_replica_is_forgotten_and_nobody_else() -> None:
    held = HeldStates(8)
    held.report([A, B], 0, 5)
    held.expect([A], 1)
    held.forget(0b101)
    assert found(held, A, B) == [(1, 0b10)]
    held.report([B], 0, 1)
    assert found(held, A, B) == [(1, 0b11), (2, 0b01)], "its number is another one's"


def test_the_memory_is_bounded_and_free_again_when_states_are_gone() -> None:
    held = HeldStates(2)
    held.report([A, B, C], 0, 1)
    assert len(held) == 2
    held.expect([A, B, C, D], 1)
    assert len(held) == 2
    held.report([], 0, 2)
    held.discard([A, B, C, D], 1)
    held.add([D], 1)
    assert found(held, D) == [(1, 0b10)]


def test_any_order_of_events_agrees_with_sets() -> None:
    rng = Random(1)
    hashes = [bytes([n]) for n in range(12)]
    held = HeldStates(100)
    until: list[dict[bytes, float]] = [{} for _ in range(3)]
    numbers = [0, 0, 0]
    for _ in range(3000):
        replica = rng.randrange(3)
        some = rng.sample(hashes, rng.randint(0, 6))
        its = until[replica]
        match rng.choice(("expect", "add", "discard", "report", "find", "find")):
            case "expect":
                held.expect(some, replica)
                its |= dict.fromkeys(some, math.inf)
            case "add":
                held.add(some, replica)
                its |= dict.fromkeys(some, numbers[replica] + REPORTS_AWAITED)
            case "discard":
                held.discard(some, replica)
                until[replica] = {h: last for h, last in its.items() if h not in some}
            case "report":
                numbers[replica] = number = numbers[replica] + 1
                held.report(some, replica, number)
                left = {h: last for h, last in its.items() if last > number}
                until[replica] = dict.fromkeys(some, number + 1) | left
            case _:
                best = [
                    max((n for n, h in enumerate(some, 1) if h in mine), default=0)
                    for mine in until
                ]
                want = [
                    (n, sum(1 << r for r in range(3) if best[r] >= n))
                    for n in sorted({*best} - {0})
                ]
                assert held.find(some, 0b111) == want
