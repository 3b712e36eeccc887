"""What is done to a cluster, and what is seen."""

import asyncio
import os
import signal
import subprocess
import time

import httpx2
import psutil

from tests.cluster.conversations import Conversation, Turn, ask, cached_share, client_of, converse
from tests.cluster.machines import Results, eventually, replica_processes

CONVERSATIONS, TURNS = 12, 6
LEAST_SHARE = 0.95
LONG_ANSWER = 400
REPLICAS = 3
BACK_WITHIN_S = 60.0
# Ray hears of requests every 10 s, and averages those of 15 s.
SCALED_WITHIN_S = 90.0
# Refusals of a front that drains, and of one that is gone.
REFUSED = (httpx2.ConnectError, httpx2.RemoteProtocolError, httpx2.ReadError)


def conversations(first: int = 0, count: int = CONVERSATIONS, key: str = "") -> list[Conversation]:
    """New ones. first: the number of the first."""
    return [Conversation(number, key) for number in range(first, first + count)]


async def affinity(results: Results, port: int, alone: list[Conversation]) -> None:
    """All conversations, compared with a server that had them alone."""
    them = conversations()
    seconds = await converse(port, them, TURNS)
    share = cached_share(them, alone)
    first_s = sorted(turn.first_s for its in them for turn in its.turns)
    print(f"first token {1e3 * first_s[len(first_s) // 2]:.0f} ms; all turns {seconds:.1f} s")
    errors = [turn.error for its in them for turn in its.turns if turn.error]
    results.check("no answer failed", not errors, errors[:3])
    texts, wanted = ([[turn.text for turn in its.turns] for its in all_] for all_ in (them, alone))
    results.check("answers equal those of one server", texts == wanted)
    results.check(f"hits at least {LEAST_SHARE:.0%}", share >= LEAST_SHARE, f"{share:.1%}")


async def killed(results: Results, port: int) -> None:
    await _failure(results, port, signal.SIGKILL, 100)


async def stopped(results: Results, port: int) -> None:
    await _failure(results, port, signal.SIGSTOP, 200)


async def _failure(results: Results, port: int, sign: signal.Signals, first: int) -> None:
    """A replica gets a signal under answers; then its conversations go on."""
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
        results.check(f"{sign.name}: none of {len(turns)} silent", known, errors)
        results.check(f"{sign.name}: all ended soon", seconds < 30, f"{seconds:.1f} s")
        again = await asyncio.gather(*(ask(client, its) for its in them))
        failed = [turn.error for turn in again if turn.error]
        results.check(f"{sign.name}: conversations go on elsewhere", not failed, failed[:3])
    took = await eventually(
        lambda: not victim.is_running() and replicas_up(port) == REPLICAS, BACK_WITHIN_S
    )
    results.check(f"{sign.name}: there are {REPLICAS} replicas again", True, f"{took:.0f} s")


async def drained(results: Results, port: int, serving: "subprocess.Popen[bytes]") -> None:
    """The command is told to end under answers."""
    them = conversations(300)
    async with client_of(port) as client:
        asking = asyncio.gather(*(ask(client, its, LONG_ANSWER, whole=True) for its in them))
        await asyncio.sleep(0.5)
        serving.send_signal(signal.SIGTERM)
        refused = await _refused(client)
        turns = await asking
    results.check("drain: a new request is refused", bool(refused), refused)
    failed = [turn.error for turn in turns if turn.error]
    results.check("drain: running answers end whole", not failed, failed[:3])


async def _refused(client: httpx2.AsyncClient) -> str:
    """Ask until that is refused; return how."""
    turn = Turn()
    while not turn.error:
        try:
            turn = await ask(client, Conversation(400), 1)
        except REFUSED as error:
            return type(error).__name__
    return turn.error


async def tenants(results: Results, port: int, keys: tuple[str, str]) -> None:
    """The same prompt under two keys, twice each."""
    cached: list[int] = []
    async with client_of(port) as client:
        for key in (keys[0], keys[0], keys[1], keys[1]):
            turn = await ask(client, Conversation(700, key))
            cached.append(turn.cached_tokens)
    good = cached[1] > 0 and cached[2] == 0 and cached[3] > 0
    results.check("two tenants never share", good, f"cached: {cached}")


async def crowd(results: Results, port: int, key: str) -> None:
    """More at once than all replicas take, until there is another one."""
    turns: list[Turn] = []

    async def keep_asking(client: httpx2.AsyncClient, its: Conversation) -> None:
        while not more.done():
            turns.append(await ask(client, its, LONG_ANSWER // 4, whole=True))
            if turns[-1].error:
                await asyncio.sleep(0.5)

    async with client_of(port) as client:
        more = asyncio.create_task(eventually(lambda: replicas_up(port, key) == 2, SCALED_WITHIN_S))
        await asyncio.gather(*(keep_asking(client, its) for its in conversations(500, 20, key)))
        results.check("a crowd brings a second replica", True, f"{await more:.0f} s")
    refused = [turn for turn in turns if turn.error]
    untold = [
        turn for turn in refused if turn.error[:3] not in ("429", "503") or not turn.retry_after
    ]
    seen = f"{len(refused)} of {len(turns)} refused; {len(untold)} not told: {untold[:1]}"
    results.check("refused clients are told when to come back", bool(refused) and not untold, seen)


def busiest() -> psutil.Process:
    """The replica that computes most."""
    there = replica_processes()
    before = {its.pid: its.cpu_times().user for its in there}
    time.sleep(0.1)
    return max(there, key=lambda its: its.cpu_times().user - before[its.pid])


def replicas_up(port: int, key: str = "") -> int:
    """How many answer, as the front has it."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    page = httpx2.get(f"http://127.0.0.1:{port}/metrics", headers=headers, timeout=10.0).text
    ups = [line for line in page.splitlines() if line.startswith("quire_replica_up_ratio{")]
    return sum(line.endswith(" 1.0") for line in ups)
