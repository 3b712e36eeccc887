"""What is claimed of the router, on clusters that are small enough for every day."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.types import PrefixNews
from server.cluster.prefix_router import Load
from tests.cluster.growth import (
    LEAST_HITS,
    LONG_ANSWERS,
    ROUTER_BYTES_PER_HASH,
    main,
    router_bytes,
    run_engines,
    run_hybrid_engines,
    run_machines,
    run_unlike_engines,
)
from tests.cluster.growth_engines import BLOCK_TOKENS, Account, Cluster, Talk, Told, names
from tests.cluster.growth_machines import MEMORIES_GIB, SPEEDS
from tests.cluster.policies import ByPrefix

REPLICAS = 4
MAX_HASHES = 4096
# Memory for a third of what a replica's conversations have.
TIGHT = replace(Talk(), cache_tokens=4 * 1024)


class Deaf(ByPrefix):
    """Nobody tells it what was evicted."""

    def report(self, replica: str, load: Load, news: PrefixNews) -> None:
        super().report(replica, load, PrefixNews([], None))


class Misled(ByPrefix):
    """It is told that everything was evicted, and hears of nothing that was."""

    def __init__(self, names: Sequence[str], *, max_hashes: int, block_tokens: int) -> None:
        super().__init__(names, max_hashes=max_hashes, block_tokens=block_tokens)
        self._all: set[bytes] = set()

    def choose(self, hashes: Sequence[bytes], tokens: int) -> str:
        self._all.update(hashes)
        return super().choose(hashes, tokens)

    def report(self, replica: str, load: Load, news: PrefixNews) -> None:
        super().report(replica, load, PrefixNews(list(self._all), None))


def run(kind: type[ByPrefix], talk: Talk) -> Account:
    """Each token is compared with a reference; all conversations come to their ends."""
    its = names(REPLICAS)
    policy = kind(its, max_hashes=MAX_HASHES, block_tokens=BLOCK_TOKENS)
    account = Cluster(REPLICAS, policy, talk, seed=1).run()
    assert account.requests == REPLICAS * talk.conversations * talk.turns
    return account


def test_engines_get_nearly_all_possible_hits_and_grow_by_their_number() -> None:
    alone = run_engines(1, "prefix", seed=1).account
    together = run_engines(REPLICAS, "prefix", seed=1).account
    scattered = run_engines(REPLICAS, "two choices", seed=1).account
    assert alone.hit_ratio == 1.0
    assert together.hit_ratio >= LEAST_HITS > scattered.hit_ratio + 0.2
    assert together.requests_per_s > 0.8 * REPLICAS * alone.requests_per_s
    assert together.requests_per_s > 1.2 * scattered.requests_per_s
    assert together.first_s(0.5) < scattered.first_s(0.5) / 2
    assert min(together.by_replica) > max(together.by_replica) / 2


def test_a_router_that_is_lied_to_about_evictions_loses_hits_and_no_token() -> None:
    honest, misled = run(ByPrefix, Talk()), run(Misled, Talk())
    assert misled.hit_ratio < honest.hit_ratio - 0.1
    for kind in (Deaf, Misled):
        assert run(kind, TIGHT).evicted_blocks > 0


def test_machines_of_unlike_speed_and_memory_get_nearly_all_possible_hits() -> None:
    its = run_machines(len(SPEEDS) * len(MEMORIES_GIB), "prefix", busy=0.5, seed=1, per=40)
    scattered = run_machines(len(its.replicas), "two choices", busy=0.5, seed=1, per=40)
    assert its.hit_ratio >= LEAST_HITS > scattered.hit_ratio + 0.2
    assert its.wait_s(0.95) < scattered.wait_s(0.95) / 4


def test_where_there_is_much_to_do_machines_get_it_in_proportion_to_their_speed() -> None:
    its = run_machines(2 * len(SPEEDS) * len(MEMORIES_GIB), "prefix", busy=0.8, seed=1, per=150)
    kinds = list(its.kinds())
    for speed in SPEEDS:
        some = [kind for kind in kinds if kind.speed == speed]
        got, due = sum(kind.requests for kind in some), sum(kind.of_speed for kind in some)
        assert got == pytest.approx(due, rel=0.25), speed
    fast = {kind.memory_gib: kind.requests for kind in kinds if kind.speed == max(SPEEDS)}
    assert fast[max(MEMORIES_GIB)] > fast[min(MEMORIES_GIB)]


def test_replicas_find_out_how_fast_they_are_beside_long_answers() -> None:
    some = replace(LONG_ANSWERS, conversations=16)
    measured = run_unlike_engines(len(SPEEDS), Told.MEASURED, seed=1, talk=some)
    nothing = run_unlike_engines(len(SPEEDS), Told.NOTHING, seed=1, talk=some)
    found = [each.measured for each in measured.replicas.values()]
    assert [speed / found[0] for speed in found] == pytest.approx(SPEEDS, rel=0.25)
    assert measured.share_of(max(SPEEDS)) > nothing.share_of(max(SPEEDS)) + 0.03
    assert measured.account.requests_per_s > 0.95 * nothing.account.requests_per_s


def test_of_a_hybrid_the_router_promises_what_there_is() -> None:
    knowing = run_hybrid_engines(2, seed=1, knows_states=True).account
    ignorant = run_hybrid_engines(2, seed=1, knows_states=False).account
    assert knowing.promised_ratio < 1.05
    assert ignorant.promised_ratio > 1.1


def test_the_same_seed_gives_the_same_figures() -> None:
    first, second = (run_engines(2, "prefix", seed=3).account for _ in range(2))
    assert first == second
    one, other = (run_machines(9, "prefix", busy=0.5, seed=3, per=5) for _ in range(2))
    assert one.waits_s == other.waits_s


def test_the_memory_of_a_router_is_bounded_whatever_it_is_told() -> None:
    for replicas in (10, 1000):
        full = router_bytes(replicas, MAX_HASHES, 2 * MAX_HASHES)
        more = router_bytes(replicas, MAX_HASHES, 8 * MAX_HASHES)
        assert more < 1.2 * full
        assert more < ROUTER_BYTES_PER_HASH * MAX_HASHES + 1024 * replicas


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--engines",
            "2",
            "--unlike-engines",
            "3",
            "--chats",
            "2",
            "--hybrids",
            "1",
            "--replicas",
            "10",
            "--unlike",
            "1",
            "--per",
            "20",
            "--hashes",
            "2048",
        ]
    )
    said = capsys.readouterr().out
    assert said.count("prefix") == 2 + 3
    assert "us/req" in said
    assert "MiB" in said
