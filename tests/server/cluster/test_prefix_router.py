"""Where requests go."""

import tracemalloc
from collections import Counter
from hashlib import sha256
from time import perf_counter

import pytest

from engine.types import BlockHashes
from server.chat.salts import Salts
from server.cluster.prefix_router import MAX_LENGTHS, Choice, Load, PrefixRouter, Reason

BLOCK = 16
IDLE = Load(waiting=0, running=0, free_blocks=1000, total_blocks=1000, speed=1000.0)


def router(*names: str, max_hashes: int = 10_000, load: Load = IDLE) -> PrefixRouter:
    its = PrefixRouter(max_hashes=max_hashes, block_tokens=BLOCK)
    its.set_replicas(names)
    for name in names:
        its.report_load(name, load)
    return its


def prompt(name: str, blocks: int) -> list[bytes]:
    """Hashes of a prompt that begins like no other one."""
    return [sha256(f"{name} {block}".encode()).digest() for block in range(blocks)]


def ask(its: PrefixRouter, hashes: list[bytes], tokens: int | None = None) -> Choice:
    chosen = its.choose(hashes, BLOCK * len(hashes) + 1 if tokens is None else tokens)
    assert chosen is not None
    return chosen


def answer(its: PrefixRouter, replica: str, hashes: list[bytes]) -> None:
    flight = its.sent(replica, hashes, BLOCK * len(hashes) + 1)
    its.started(flight)
    its.finished(flight)


def flood(its: PrefixRouter, requests: int, blocks: int = 10) -> Counter[str]:
    """New conversations, all at once, before anybody reports."""
    sent = Counter[str]()
    for number in range(requests):
        hashes = prompt(f"flood {number}", blocks)
        name = ask(its, hashes).replica
        its.sent(name, hashes, BLOCK * blocks + 1)
        sent[name] += 1
    return sent


# --- prefixes -------------------------------------------------------------------------------------


def test_without_replicas_there_is_no_choice() -> None:
    its = router()
    assert its.choose([], 5) is None
    its.set_replicas(["a"])
    assert its.choose([], 5) == Choice("a", 0, Reason.NEW)
    its.set_replicas([])
    assert its.choose([], 5) is None


def test_a_conversation_goes_to_the_replica_that_holds_it() -> None:
    its = router("a", "b", "c")
    talk = prompt("talk", 20)
    answer(its, "b", talk[:10])
    assert ask(its, talk) == Choice("b", 10, Reason.PREFIX)
    assert ask(its, prompt("other", 20)).reason is Reason.NEW


def test_an_answer_belongs_to_what_its_replica_holds() -> None:
    its = router("a", "b", "c")
    talk = prompt("talk", 20)
    its.finished(its.sent("b", talk[:10], BLOCK * 10 + 5), talk[:15])
    assert ask(its, talk) == Choice("b", 15, Reason.PREFIX)


def test_the_longest_prefix_is_preferred_to_a_longer_queue_of_the_same_length() -> None:
    its = router("a", "b", "c")
    talk = prompt("talk", 30)
    answer(its, "a", talk[:10])
    answer(its, "b", talk[:20])
    answer(its, "c", talk[:10])
    assert ask(its, talk) == Choice("b", 20, Reason.PREFIX)
    its.sent("b", prompt("long", 100), BLOCK * 100)
    its.sent("a", prompt("short", 20), BLOCK * 20)
    assert ask(its, talk) == Choice("c", 10, Reason.LOAD)


def test_a_hit_is_taken_as_long_as_it_is_worth_the_wait() -> None:
    its = router("a", "b")
    talk = prompt("talk", 50)
    answer(its, "a", talk)
    its.sent("a", prompt("other", 40), BLOCK * 40)
    assert ask(its, talk) == Choice("a", 50, Reason.PREFIX)
    its.sent("a", prompt("more", 20), BLOCK * 20)
    assert ask(its, talk) == Choice("b", 0, Reason.LOAD)


def test_where_replicas_are_always_busy_a_hit_is_worth_a_longer_wait() -> None:
    def chosen(reports: int) -> str:
        its = router("a", "b")
        talk = prompt("talk", 50)
        answer(its, "a", talk)
        its.sent("a", prompt("other", 65), BLOCK * 65)
        b = its.sent("b", prompt("small", 1), 2)
        for _ in range(reports):
            its.report_load("a", IDLE)
            its.report_load("b", IDLE)
        its.finished(b)
        return ask(its, talk).replica

    assert chosen(0) == "b"
    assert chosen(30) == "a"


def test_prefixes_of_more_lengths_than_are_told_apart_lose_the_shortest() -> None:
    names = [f"r{number}" for number in range(MAX_LENGTHS + 4)]
    its = router(*names)
    talk = prompt("talk", len(names))
    for number, name in enumerate(names, 1):
        answer(its, name, talk[:number])
    assert ask(its, talk) == Choice(names[-1], len(names), Reason.PREFIX)
    chosen = its.choose(talk, BLOCK * len(talk) + 1, without=names[4:])
    assert chosen == Choice(names[3], 4, Reason.PREFIX)


def test_a_prompt_that_is_held_in_whole_still_costs_a_token() -> None:
    its = router("a", "b")
    talk = prompt("talk", 10)
    answer(its, "a", talk)
    flight = its.sent("a", talk, BLOCK * 10)
    assert flight.tokens == 1
    assert ask(its, talk, BLOCK * 10) == Choice("a", 10, Reason.PREFIX)


def test_a_prompt_that_was_refused_is_not_held() -> None:
    its = router("a", "b")
    talk = prompt("talk", 10)
    answer(its, "a", talk[:5])
    refused = its.sent("a", talk, BLOCK * 10 + 1)
    assert ask(its, talk) == Choice("a", 10, Reason.PREFIX)
    its.finished(refused)
    assert ask(its, talk) == Choice("a", 5, Reason.PREFIX)
    its.finished(its.sent("a", talk, BLOCK * 10 + 1), talk)
    assert ask(its, talk) == Choice("a", 10, Reason.PREFIX)


# --- what replicas say ----------------------------------------------------------------------------


def test_what_was_evicted_is_no_hit() -> None:
    its = router("a", "b")
    talk = prompt("talk", 10)
    answer(its, "b", talk)
    its.report_evicted("b", talk[6:])
    assert ask(its, talk) == Choice("b", 6, Reason.PREFIX)
    its.report_evicted("b", talk)
    assert ask(its, talk).reason is Reason.NEW
    assert its.num_hashes == 0


def test_who_is_not_there_is_not_listened_to() -> None:
    its = router("a")
    talk = prompt("talk", 10)
    its.report_load("b", IDLE)
    its.report_evicted("b", talk)
    flight = its.sent("b", talk, BLOCK * 10)
    its.started(flight)
    its.finished(flight, talk)
    assert its.num_hashes == 0
    assert ask(its, talk) == Choice("a", 0, Reason.NEW)


def test_what_a_removed_replica_held_is_forgotten_and_its_number_goes_to_another() -> None:
    its = router("a", "b")
    talk = prompt("talk", 10)
    answer(its, "b", talk)
    its.set_replicas(["a", "c"])
    its.report_load("c", IDLE)
    assert its.num_hashes == 0
    assert ask(its, talk).reason is Reason.NEW
    its.set_replicas(["a", "b", "c"])
    assert ask(its, talk).reason is Reason.NEW


def test_requests_of_a_removed_replica_are_counted_nowhere() -> None:
    its = router("a", "b")
    old, talk = its.sent("b", prompt("old", 100), BLOCK * 100), prompt("talk", 10)
    begun = its.sent("b", talk, BLOCK * 10)
    its.started(begun)
    its.set_replicas(["a"])
    its.set_replicas(["a", "b"])
    its.finished(old, talk)
    its.finished(begun)
    assert its.num_hashes == 0
    sent = flood(its, 20)
    assert sent["a"] == sent["b"] == 10


def test_who_has_just_refused_a_request_is_not_asked_again() -> None:
    its = router("a", "b", "c")
    talk = prompt("talk", 10)
    answer(its, "a", talk)
    answer(its, "b", talk[:5])
    tokens = BLOCK * 10 + 1
    assert its.choose(talk, tokens) == Choice("a", 10, Reason.PREFIX)
    assert its.choose(talk, tokens, without=["a", "z"]) == Choice("b", 5, Reason.PREFIX)
    assert its.choose(talk, tokens, without=["a", "b"]) == Choice("c", 0, Reason.NEW)
    assert its.choose(talk, tokens, without=["a", "b", "c"]) is None


def test_requests_that_others_have_sent_count_as_they_are_reported() -> None:
    its = router("a", "b")
    flight = its.sent("a", prompt("mine", 5), BLOCK * 5)
    its.report_load("a", Load(3, 1, 1000, 1000, 1000.0))
    its.report_load("b", Load(0, 4, 1000, 1000, 1000.0))
    assert ask(its, prompt("new", 5)).replica == "b"
    its.finished(flight)
    its.report_load("a", IDLE)
    assert ask(its, prompt("new", 5)).replica == "a"


# --- load -----------------------------------------------------------------------------------------


def test_new_conversations_between_two_reports_do_not_herd() -> None:
    sent = flood(router(*"abcdefghij"), 100)
    assert sorted(sent.values()) == [10] * 10


def test_machines_get_new_conversations_in_proportion_to_their_speed() -> None:
    its = router("a", "b", "c")
    for name, speed in zip("abc", (100.0, 200.0, 400.0), strict=True):
        its.report_load(name, Load(0, 0, 10_000, 10_000, speed))
    sent = flood(its, 350)
    for name, due in zip("abc", (50, 100, 200), strict=True):
        assert sent[name] == pytest.approx(due, rel=0.25)


def test_idle_machines_get_new_conversations_in_proportion_to_their_memory() -> None:
    its = router("a", "b")
    its.report_load("a", Load(0, 0, 500, 500, 100.0))
    its.report_load("b", Load(0, 0, 1500, 1500, 100.0))
    sent = Counter[str]()
    for number in range(400):
        hashes = prompt(f"{number}", 5)
        sent[ask(its, hashes).replica] += 1
        answer(its, ask(its, hashes).replica, hashes)
    assert sent["b"] / sent["a"] == pytest.approx(3, rel=0.1)


def test_where_nothing_is_evicted_for_it_a_slower_machine_may_be_better() -> None:
    def chosen(free_blocks: int) -> str:
        its = router("fast", "slow")
        its.sent("fast", prompt("before", 10), BLOCK * 10)
        its.report_load("fast", Load(0, 1, free_blocks, 1000, 150.0))
        its.report_load("slow", Load(0, 0, 1000, 1000, 70.0))
        return ask(its, prompt("new", 10)).replica

    assert chosen(1000) == "fast"
    assert chosen(0) == "slow"


def test_prompts_that_have_been_computed_no_longer_wait() -> None:
    its = router("a", "b")
    a = its.sent("a", prompt("a", 50), BLOCK * 50)
    its.sent("b", prompt("b", 20), BLOCK * 20)
    assert ask(its, prompt("new", 5)).replica == "b"
    its.started(a)
    its.started(a)
    assert ask(its, prompt("new", 5)).replica == "a"
    its.finished(a)
    its.finished(a)
    its.started(a)
    assert ask(its, prompt("new", 5)).replica == "a"


def test_running_answers_make_a_replica_slower() -> None:
    its = router("a", "b")
    flights = [its.sent("a", prompt(f"{number}", 1), BLOCK) for number in range(8)]
    for flight in flights:
        its.started(flight)
    its.sent("b", prompt("b", 20), BLOCK * 20)
    assert ask(its, prompt("short", 50)).replica == "a"
    assert ask(its, prompt("long", 100)).replica == "b"


def test_a_replica_that_has_not_reported_is_taken_for_as_fast_as_others() -> None:
    its = router("a", "b")
    its.report_load("a", Load(0, 0, 1000, 1000, 400.0))
    its.set_replicas(["a", "b", "c"])
    its.report_load("c", Load(0, 0, 1000, 0, 0.0))
    sent = flood(its, 100)
    assert min(sent.values()) > 10


# --- tenants --------------------------------------------------------------------------------------


def test_tenants_never_share_a_hash_and_so_no_replica_for_its_prefix() -> None:
    salts = Salts(b"of the cluster")
    both = []
    for key, own in (("one", None), ("two", None), ("one", "mine")):
        hashes = BlockHashes(b"model", salts.salt(key, own), BLOCK)
        hashes.extend(range(40 * BLOCK), 0)
        both.append(hashes.digests)
    first, *others = both
    its = router("a", "b")
    answer(its, "a", first)
    assert ask(its, first) == Choice("a", 40, Reason.PREFIX)
    for other in others:
        assert not set(first) & set(other)
        assert ask(its, other).reason is Reason.NEW


# --- bounds ---------------------------------------------------------------------------------------


def traced_bytes(replicas: int, prompts: int, max_hashes: int) -> int:
    names = [f"r{number}" for number in range(replicas)]
    tracemalloc.start()
    its = router(*names, max_hashes=max_hashes)
    for number in range(prompts):
        answer(its, names[number % replicas], prompt(f"{number}", 20))
        answer(its, names[-number % replicas], prompt("common", 20))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert its.num_hashes <= max_hashes
    return size


def test_memory_is_bounded_by_the_number_of_hashes() -> None:
    full = traced_bytes(10, 400, 4000)
    assert traced_bytes(10, 1600, 4000) < 1.5 * full
    assert traced_bytes(1000, 1600, 4000) < 1.5 * full + 1000 * 1024
    assert full < 4000 * 400


def test_a_choice_among_a_thousand_replicas_takes_less_than_a_millisecond() -> None:
    names = [f"r{number}" for number in range(1000)]
    its = router(*names, max_hashes=100_000)
    common = prompt("common", 20)
    talks = [common + prompt(f"{number}", 20) for number in range(200)]
    for number, talk in enumerate(talks):
        answer(its, names[5 * number], talk)

    def seconds() -> float:
        began = perf_counter()
        for talk in talks:
            answer(its, ask(its, talk).replica, talk)
        return (perf_counter() - began) / len(talks)

    # The best of some: others use this machine, too.
    assert min(seconds() for _ in range(5)) < 1e-3


# --- models that go on from states alone ----------------------------------------------------------


def states_router(*names: str) -> PrefixRouter:
    its = PrefixRouter(max_hashes=1000, block_tokens=BLOCK, keeps_states=True)
    its.set_replicas(names)
    for name in names:
        its.report_load(name, IDLE)
    return its


def test_where_a_model_needs_states_blocks_beyond_the_newest_one_do_not_count() -> None:
    its = states_router("b")
    talk = prompt("talk", 12)
    flight = its.sent("b", talk[:10], 10 * BLOCK + 3, ends=(2, 10))
    other = [*talk[:8], *prompt("other", 4)]
    assert ask(its, other) == Choice("b", 2, Reason.PREFIX)
    assert ask(its, talk) == Choice("b", 10, Reason.PREFIX), "even while it is being computed"
    its.started(flight)
    its.finished(flight, talk[:11])
    assert ask(its, talk) == Choice("b", 11, Reason.PREFIX), "the end of its answer"
    assert ask(its, talk[:9]) == Choice("b", 2, Reason.PREFIX)
    assert its.sent("b", other, 12 * BLOCK, ends=(2, 11)).tokens == 10 * BLOCK


def test_states_are_those_that_a_replica_reports() -> None:
    its = states_router("a", "b")
    talk = prompt("talk", 12)
    flight = its.sent("b", talk[:10], 10 * BLOCK + 3, ends=(2, 10))
    its.report_states("b", 1, [])
    its.started(flight)
    its.finished(flight, talk[:11])
    its.report_states("b", 2, [talk[1], talk[10]])
    its.report_states("b", 3, [talk[1], talk[10]])
    assert ask(its, talk) == Choice("b", 11, Reason.PREFIX)
    its.report_states("b", 4, [talk[1]])
    assert ask(its, talk) == Choice("b", 2, Reason.PREFIX), "the others were evicted"
    its.report_states("a", 1, talk[:5])
    assert ask(its, talk) == Choice("a", 5, Reason.PREFIX)
    its.report_states("c", 1, talk)
    its.set_replicas(["b"])
    assert ask(its, talk) == Choice("b", 2, Reason.PREFIX)


def test_a_prompt_that_ends_before_its_first_token_leaves_no_state() -> None:
    its = states_router("a", "b")
    talk = prompt("talk", 12)
    answer(its, "b", talk[:4])
    flight = its.sent("b", talk, 12 * BLOCK + 1, ends=(12,))
    its.finished(flight)
    assert ask(its, talk).reason is Reason.NEW
    gone = its.sent("b", talk, 12 * BLOCK + 1, ends=(12,))
    its.set_replicas(["a"])
    its.started(gone)
    its.finished(gone, talk)
    assert ask(its, talk).reason is Reason.NEW


def test_states_say_nothing_where_a_model_needs_none() -> None:
    its = router("a")
    its.report_states("a", 1, prompt("talk", 3))
    assert ask(its, prompt("talk", 3)).reason is Reason.NEW
