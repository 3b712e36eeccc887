"""How a cluster grows: ``python -m tests.cluster.growth [--engines N] [--replicas N] [--seed N]``,
or ``python -m tests.cluster.growth --seed 2``.

Hits are shares of the tokens that one cache which holds everything and forgets nothing would have
had. Requests per second and seconds until the first token are of simulated clocks, the same at
every run; the router's own time and memory are measured here, of production code.
growth_engines.py and growth_machines.py say what is assumed.
"""

import argparse
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

from server.cluster.prefix_router import PrefixRouter
from tests.cluster.growth_engines import BLOCK_TOKENS as ENGINE_BLOCK_TOKENS
from tests.cluster.growth_engines import Cluster, Talk, Told, names
from tests.cluster.growth_machines import (
    BLOCK_TOKENS,
    MEMORIES_GIB,
    SPEEDS,
    Report,
    StatisticalCluster,
    machines,
)
from tests.cluster.policies import ByPrefix, Policy, RoundRobin, TwoChoices

MIB = 1024**2
LEAST_HITS = 0.95
ENGINES = (1, 2, 4, 8, 16)
REPLICAS = (10, 100, 1000)
# Per statistical replica.
CONVERSATIONS = 100
LOADS = (0.3, 0.6, 0.8)
KINDS = len(SPEEDS) * len(MEMORIES_GIB)
# All that 1000 machines hold are some 900 000 blocks of 128 tokens.
MAX_HASHES = 2**20
SMALL_MAX_HASHES = 2**15
PROMPT_HASHES = 32
ROUTER_BYTES_PER_HASH = 320
MAKERS: dict[str, Callable[[Sequence[str], int], Policy]] = {
    "round robin": lambda its, _: RoundRobin(its),
    "two choices": lambda its, _: TwoChoices(its),
    "prefix": lambda its, block: ByPrefix(its, max_hashes=MAX_HASHES, block_tokens=block),
}


# Chats: answers are most of what is computed.
LONG_ANSWERS = replace(
    Talk(), turns=4, answered=(100, 240), conversations=32, cache_tokens=64 * 1024
)


def run_unlike_engines(replicas: int, told: Told, seed: int, talk: Talk = LONG_ANSWERS) -> Cluster:
    """Engines on machines of unlike speed whose answers are long, behind the production router."""
    policy = ByPrefix(names(replicas), max_hashes=MAX_HASHES, block_tokens=ENGINE_BLOCK_TOKENS)
    cluster = Cluster(replicas, policy, talk, seed, speeds=SPEEDS, told=told)
    cluster.run()
    return cluster


# A model with recurrent layers: each conversation keeps some states, and there is room for few.
HYBRID = replace(Talk(), cells=30)


def run_hybrid_engines(replicas: int, seed: int, *, knows_states: bool) -> Cluster:
    """Engines of a model that goes on from states alone. knows_states: whether the router does."""
    policy = ByPrefix(
        names(replicas),
        max_hashes=MAX_HASHES,
        block_tokens=ENGINE_BLOCK_TOKENS,
        keeps_states=knows_states,
    )
    cluster = Cluster(replicas, policy, HYBRID, seed)
    cluster.run()
    return cluster


def run_engines(replicas: int, how: str, seed: int) -> Cluster:
    """A cluster of engines that has been run."""
    policy = MAKERS[how](names(replicas), ENGINE_BLOCK_TOKENS)
    cluster = Cluster(replicas, policy, Talk(), seed)
    cluster.run()
    return cluster


def run_machines(replicas: int, how: str, busy: float, seed: int, per: int) -> Report:
    """per: conversations per replica."""
    its = machines(replicas)
    policy = MAKERS[how]([each.name for each in its], BLOCK_TOKENS)
    cluster = StatisticalCluster(its, policy, conversations=per * replicas, busy=busy, seed=seed)
    report = cluster.run()
    if isinstance(policy, ByPrefix):
        report.router_hashes = policy.router.num_hashes
    return report


def router_bytes(replicas: int, max_hashes: int, hashes: int) -> int:
    """The memory of a router that was told of so many hashes, in prompts that begin alike."""
    its = names(replicas)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    router = PrefixRouter(max_hashes=max_hashes, block_tokens=BLOCK_TOKENS)
    router.set_replicas(its)
    for number in range(hashes // PROMPT_HASHES):
        prompt = [sha256(b"%d" % block).digest() for block in range(PROMPT_HASHES // 2)]
        prompt += [sha256(b"%d %d" % (number, block)).digest() for block in range(PROMPT_HASHES)]
        name = its[number % replicas]
        flight = router.sent(name, prompt, BLOCK_TOKENS * len(prompt))
        router.started(flight)
        router.finished(flight, prompt)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert router.num_hashes <= max_hashes
    return after - before


# --- tables ---------------------------------------------------------------------------------------


def engines_table(most: int, seed: int) -> float:
    """Print it; return the smallest share of hits of the prefix router."""
    talk, worst = Talk(), 1.0
    print(
        f"engines: {talk.conversations} conversations of {talk.turns} turns per replica\n"
        f"{'replicas':>8}  {'router':<12} {'hits':>7} {'req/s':>8} {'first token':>12} "
        f"{'computed':>9} {'per replica':>12}"
    )
    for replicas in [its for its in ENGINES if its <= most]:
        for how in MAKERS:
            its = run_engines(replicas, how, seed).account
            print(
                f"{replicas:>8}  {how:<12} {its.hit_ratio:>7.1%} {its.requests_per_s:>8.2f} "
                f"{its.first_s(0.5):>10.2f} s {its.computed_tokens:>9,} "
                f"{min(its.by_replica):>6} to {max(its.by_replica)}",
                flush=True,
            )
            if how == "prefix":
                worst = min(worst, its.hit_ratio)
    return worst


def speeds_table(replicas: int, seed: int, per: int) -> None:
    """Engines of unlike speed with long answers, by what the router is told of their speed."""
    low, high = LONG_ANSWERS.answered
    talk = replace(LONG_ANSWERS, conversations=per)
    print(
        f"\n{replicas} engines of unlike speed, answers of {low} to {high} tokens\n"
        f"{'speeds':<9} {'hits':>7} {'req/s':>7} {'first token':>12} {'95 %':>9} "
        f"{'answer':>9} {'95 %':>9}  requests at 1 : 2 : 4"
    )
    for told in Told:
        cluster = run_unlike_engines(replicas, told, seed, talk)
        its = cluster.account
        shares = [cluster.share_of(speed) for speed in SPEEDS]
        print(
            f"{told.value:<9} {its.hit_ratio:>7.1%} {its.requests_per_s:>7.2f} "
            f"{its.first_s(0.5):>10.2f} s {its.first_s(0.95):>7.2f} s "
            f"{its.answer_s(0.5):>7.2f} s {its.answer_s(0.95):>7.2f} s  "
            + " : ".join(f"{share:.0%}" for share in shares),
            flush=True,
        )


def hybrids_table(replicas: int, seed: int) -> None:
    """Engines of a model with recurrent layers, by what the router knows of their states."""
    print(
        f"\n{replicas} engines of a hybrid with {HYBRID.cells} states each; "
        "promised: what the router took for cached, of what was\n"
        f"{'router knows':<14} {'hits':>7} {'promised':>9} {'req/s':>7} {'first token':>12} "
        f"{'computed':>9}"
    )
    for knows, name in ((True, "states"), (False, "blocks alone")):
        its = run_hybrid_engines(replicas, seed, knows_states=knows).account
        print(
            f"{name:<14} {its.hit_ratio:>7.1%} {its.promised_ratio:>9.1%} "
            f"{its.requests_per_s:>7.2f} {its.first_s(0.5):>10.2f} s {its.computed_tokens:>9,}",
            flush=True,
        )


def unlike_table(replicas: int, seed: int, per: int) -> None:
    """Machines of unlike speed and memory, at three loads."""
    print(
        f"\n{replicas} machines of unlike speed and memory\n"
        f"{'load':>5}  {'router':<12} {'hits':>7} {'req/s':>8} {'first token':>12} {'95 %':>9}"
    )
    for busy in LOADS:
        for how in MAKERS:
            its = run_machines(replicas, how, busy, seed, per)
            print(
                f"{busy:>5.0%}  {how:<12} {its.hit_ratio:>7.1%} {its.requests_per_s:>8.2f} "
                f"{its.wait_s(0.5):>10.2f} s {its.wait_s(0.95):>7.1f} s",
                flush=True,
            )
        print("       speed  memory  requests  of all speed  memory held    hits")
        for kind in its.kinds():
            print(
                f"{kind.speed:>12.0f} {kind.memory_gib:>4} GiB {kind.requests:>9.1%} "
                f"{kind.of_speed:>13.1%} {kind.held:>12.0%} {kind.hit_ratio:>7.1%}"
            )


def growth_table(most: int, seed: int, per: int) -> float:
    """10 to 1000 machines of unlike speed and memory, at the middle load. Return the smallest share
    of hits."""
    worst = 1.0
    print(
        f"\ngrowth: {per} conversations per replica, load {LOADS[1]:.0%}; "
        f"the router: {MAX_HASHES:,} hashes at most\n"
        f"{'replicas':>8} {'conversations':>13} {'requests':>9} {'hits':>7} {'req/s':>8} "
        f"{'first token':>12} {'router':>13} {'hashes':>10}"
    )
    for replicas in [its for its in REPLICAS if its <= most]:
        its = run_machines(replicas, "prefix", LOADS[1], seed, per)
        print(
            f"{replicas:>8} {per * replicas:>13,} {its.requests:>9,} "
            f"{its.hit_ratio:>7.1%} {its.requests_per_s:>8.1f} {its.wait_s(0.5):>10.2f} s "
            f"{its.router_us:>6.0f} us/req {its.router_hashes:>10,}",
            flush=True,
        )
        worst = min(worst, its.hit_ratio)
    return worst


def memory_table(most: int, hashes: int) -> None:
    """What the router takes for as many hashes as it remembers, and more."""
    print(
        f"\nmemory of a router of {hashes:,} hashes at most, traced, told of\n"
        f"{'replicas':>8} {'half':>10} {'all':>10} {'twice':>10} {'four times':>11}"
    )
    for replicas in [its for its in REPLICAS if its <= most]:
        sizes = [router_bytes(replicas, hashes, int(part * hashes)) for part in (0.5, 1, 2, 4)]
        print(f"{replicas:>8} " + " ".join(f"{size / MIB:>6.1f} MiB" for size in sizes))


def main(arguments: Sequence[str]) -> None:
    """Exit with 1 where the production router loses more hits than it may."""
    parser = argparse.ArgumentParser(prog="growth", description=__doc__)
    parser.add_argument("--engines", type=int, default=max(ENGINES), help="replicas, at most")
    parser.add_argument("--unlike-engines", type=int, default=3, help="of three speeds")
    parser.add_argument(
        "--chats", type=int, default=LONG_ANSWERS.conversations, help="with each of these"
    )
    parser.add_argument("--hybrids", type=int, default=4, help="engines of a hybrid")
    parser.add_argument("--replicas", type=int, default=max(REPLICAS), help="statistical ones")
    parser.add_argument("--unlike", type=int, default=10, help="of every kind, side by side")
    parser.add_argument("--per", type=int, default=CONVERSATIONS, help="conversations of each")
    parser.add_argument("--hashes", type=int, default=SMALL_MAX_HASHES, help="for its memory")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    worst = engines_table(asked.engines, asked.seed)
    speeds_table(asked.unlike_engines, asked.seed, asked.chats)
    hybrids_table(asked.hybrids, asked.seed)
    unlike_table(asked.unlike * KINDS, asked.seed, asked.per)
    worst = min(worst, growth_table(asked.replicas, asked.seed, asked.per))
    memory_table(asked.replicas, asked.hashes)
    print(f"\nengines and growth: {worst:.1%} of possible hits at least; {LEAST_HITS:.0%} are due")
    if worst < LEAST_HITS:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
