"""What is done to a cluster, and what is seen."""

import asyncio
import os
import signal
import statistics
import time

import httpx2
import psutil

from tests.cluster.conversations import Conversation, ask, cached_share, client_of, converse
from tests.cluster.machines import Supervised, eventually, replica_processes
from tests.cluster.results import Results

CONVERSATIONS, TURNS = 12, 6
PAIRS = 24
LEAST_SHARE = 0.95
# Those that have to hit so often.
NEAR = ("quire", "gateway")
MOST_RATIO, MOST_MORE_S = 1.2, 0.020
LONG_ANSWER = 400
BACK_WITHIN_S = 60.0
HEAD_BACK_WITHIN_S = 150.0
# Engines tell Ray what they need every 10 s, and of that 15 s count.
SCALED_WITHIN_S = 90.0
REPLICAS = 3


def conversations(first: int = 0, count: int = CONVERSATIONS, key: str = "") -> list[Conversation]:
    """New ones. first: the number of the first."""
    return [Conversation(number, key) for number in range(first, first + count)]


async def affinity(results: Results, name: str, port: int, alone: list[Conversation]) -> None:
    """All conversations, compared with a server that had them alone."""
    them = conversations()
    seconds = await converse(port, them, TURNS)
    texts = [[turn.text for turn in its.turns] for its in them]
    equal = texts == [[turn.text for turn in its.turns] for its in alone]
    share = cached_share(them, alone)
    first_ms = 1e3 * statistics.median(turn.first_s for its in them for turn in its.turns)
    results.row(name, f"{share:.1%}", "yes" if equal else "no", f"{first_ms:.1f}", f"{seconds:.1f}")
    errors = [turn.error for its in them for turn in its.turns if turn.error]
    results.check(f"{name}: no answer failed", not errors, errors[:3])
    results.check(f"{name}: answers equal those of one server", equal)
    if name in NEAR:
        results.check(
            f"{name}: hits at least {LEAST_SHARE:.0%}", share >= LEAST_SHARE, f"{share:.1%}"
        )


async def first_tokens(results: Results, port: int, direct_port: int) -> None:
    """The same turn of the cluster and of a server, one after the other, in both orders."""
    pairs: list[tuple[float, float]] = []
    async with client_of(port) as ours, client_of(direct_port) as theirs:
        one, other = Conversation(900), Conversation(900)
        for number in range(PAIRS):
            both = [(ours, one), (theirs, other)]
            for client, conversation in both if number % 2 else reversed(both):
                await ask(client, conversation, 8)
            pairs.append((one.turns[-1].first_s, other.turns[-1].first_s))
    cluster_s = statistics.median(pair[0] for pair in pairs)
    direct_s = statistics.median(pair[1] for pair in pairs)
    seen = f"{1e3 * cluster_s:.1f} ms, beside {1e3 * direct_s:.1f} ms"
    good = cluster_s <= MOST_RATIO * direct_s + MOST_MORE_S
    results.check(f"first token within {MOST_RATIO} times a server's and 20 ms", good, seen)


async def failure(results: Results, port: int, sign: signal.Signals, first: int) -> None:
    """A replica is killed, or stopped, under answers; then its conversations go on."""
    name = "kill -9" if sign is signal.SIGKILL else "SIGSTOP"
    them = conversations(first)
    await converse(port, them, 1)
    async with client_of(port) as client:
        began = time.monotonic()
        asking = asyncio.gather(*(ask(client, its, LONG_ANSWER, whole=True) for its in them))
        await asyncio.sleep(0.1)
        victim = await asyncio.to_thread(busiest)
        os.kill(victim.pid, sign)
        turns = await asking
        seconds = time.monotonic() - began
        errors = [turn.error for turn in turns if turn.error]
        known = all("replica_lost" in error or "replicas_full" in error for error in errors)
        results.check(
            f"{name}: none of {len(turns)} silent", known, f"{len(errors)} ended with an error"
        )
        results.check(f"{name}: all ended soon", seconds < 30, f"{seconds:.1f} s")
        again = await asyncio.gather(*(ask(client, its) for its in them))
        failed = [turn.error for turn in again if turn.error]
        results.check(f"{name}: conversations go on elsewhere", not failed, failed[:3])
    took = await eventually(
        lambda: not victim.is_running() and replicas_up(port) == REPLICAS, BACK_WITHIN_S
    )
    results.check(f"{name}: there are {REPLICAS} replicas again", True, f"{took:.0f} s")


async def restarted_head(results: Results, head: Supervised, port: int, members: int) -> None:
    """All processes of the head are killed, and started again as a service manager does.

    Here the member is on the same machine, and Ray begins no head there until the member's raylet
    has given up, after a minute. Between machines that minute is none of the head's.
    """
    await eventually(lambda: answering(port) == members, HEAD_BACK_WITHIN_S)
    them = conversations(400)
    await converse(port, them, 1)
    began = time.monotonic()
    async with client_of(port) as client:
        asking = asyncio.gather(
            *(ask(client, its, LONG_ANSWER, whole=True) for its in them), return_exceptions=True
        )
        await asyncio.sleep(0.1)
        killed = head.kill()
        turns = await asking
    ended_s = time.monotonic() - began
    silent = [turn for turn in turns if isinstance(turn, httpx2.TimeoutException)]
    results.check("head killed: none silent", not silent, f"all ended in {ended_s:.1f} s")
    results.check("head killed: all of its processes", killed > 3, f"{killed} processes")
    took = await eventually(lambda: answering(port) > 0, HEAD_BACK_WITHIN_S)
    results.check("head killed: served again by itself", True, f"{took + ended_s:.0f} s")
    whole = await eventually(lambda: answering(port) == members, HEAD_BACK_WITHIN_S)
    seen = f"{whole + took + ended_s:.0f} s"
    results.check(f"head killed: all {members} machines serve again", True, seen)
    async with client_of(port) as client:
        again = await asyncio.gather(*(ask(client, its) for its in conversations(400)))
    failed = [turn.error for turn in again if turn.error]
    results.check("head killed: requests are answered again", not failed, failed[:3])


def answering(port: int) -> int:
    """How many replicas answer; none where nobody listens."""
    try:
        return replicas_up(port)
    except httpx2.HTTPError:
        return 0


async def stopped_start(results: Results, port: int) -> None:
    """A replica is killed, and the one that takes its place is stopped while it starts."""
    before = {its.pid for its in guarded_processes()}
    busiest().kill()
    await eventually(lambda: {its.pid for its in guarded_processes()} - before, BACK_WITHIN_S)
    began = time.monotonic()
    (new,) = [its for its in guarded_processes() if its.pid not in before]
    new.suspend()
    # The front may still wait for a sign of life of the one before.
    await eventually(lambda: replicas_up(port) < REPLICAS, BACK_WITHIN_S)
    await eventually(lambda: not new.is_running() and replicas_up(port) == REPLICAS, BACK_WITHIN_S)
    seen = f"{time.monotonic() - began:.0f} s; fewer answered meanwhile"
    results.check("stopped while it starts: replaced", True, seen)


async def scaling(results: Results, port: int) -> None:
    """A crowd brings a second replica, and a calm hour ends it under an answer."""
    began = time.monotonic()
    crowd = asyncio.gather(*(keep_asking(port, number, 2) for number in range(500, 508)))
    more_s = await eventually(lambda: replicas_up(port) == 2, SCALED_WITHIN_S)
    crowded = [error for errors in await crowd for error in errors]
    known = all(error.startswith(("429", "503")) for error in crowded)
    seen = f"{more_s:.0f} s; {len(crowded)} refused meanwhile"
    results.check("by need: a crowd brings a second replica, and loses nothing", known, seen)
    calm = asyncio.gather(*(keep_asking(port, number, 1) for number in (520, 521)))
    await eventually(lambda: replicas_up(port) == 1, SCALED_WITHIN_S)
    failed = [error for errors in await calm for error in errors]
    results.check("by need: one ends again, and loses nothing", not failed, failed[:3])
    left_s = time.monotonic() - began
    results.check("by need: one replica again", len(replica_processes()) == 1, f"{left_s:.0f} s")


async def keep_asking(port: int, number: int, until: int) -> list[str]:
    """Ask the first question of a conversation until so many replicas answer; return the errors."""
    errors = []
    async with client_of(port) as client:
        ends_at = time.monotonic() + SCALED_WITHIN_S
        while await asyncio.to_thread(replicas_up, port) != until and time.monotonic() < ends_at:
            turn = await ask(client, Conversation(number), LONG_ANSWER // 4, whole=True)
            if turn.error:
                errors.append(turn.error)
                await asyncio.sleep(0.5)
    return errors


def guarded_processes() -> list[psutil.Process]:
    """Processes of replicas whose constructor has begun: a guard stands beside each."""
    return [its for its in replica_processes() if its.children()]


def busiest() -> psutil.Process:
    """The replica that computes most."""
    there = replica_processes()
    before = {its.pid: its.cpu_times().user for its in there}
    time.sleep(0.1)
    return max(there, key=lambda its: its.cpu_times().user - before[its.pid])


def replicas_up(port: int) -> int:
    """How many answer, as the front has it."""
    page = httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=10.0).text
    ups = [line for line in page.splitlines() if line.startswith("quire_replica_up_ratio{")]
    return sum(line.endswith(" 1.0") for line in ups)


async def crowd(results: Results, port: int, count: int, key: str) -> None:
    """More at once than all replicas take."""
    async with client_of(port) as client:
        turns = await asyncio.gather(
            *(ask(client, its, 64, whole=True) for its in conversations(300, count, key))
        )
    refused = [turn for turn in turns if turn.error]
    told = all(turn.error.startswith(("429", "503")) and turn.retry_after for turn in refused)
    seen = f"{len(refused)} of {count} refused"
    results.check(
        "full: whoever is refused is told when to come back", told and bool(refused), seen
    )


async def tenants(results: Results, port: int, keys: tuple[str, str]) -> None:
    """The same prompt under two keys, twice each."""
    cached: list[int] = []
    async with client_of(port) as client:
        for key in (keys[0], keys[0], keys[1], keys[1]):
            turn = await ask(client, Conversation(700, key))
            cached.append(turn.cached_tokens)
    good = cached[1] > 0 and cached[2] == 0 and cached[3] > 0
    results.check("two tenants never share", good, f"cached: {cached}")
