"""A second machine on this one: a network, a name and a folder for Ray of its own, and a wire."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from server.cli.cluster.ray_process import HEAD_PORT, session_folder
from tests.cluster import scenes
from tests.cluster.conversations import ask, client_of, converse
from tests.cluster.machines import BrokenError, Home, eventually, flags, free_port
from tests.cluster.namespace import is_alone
from tests.cluster.results import Results

ROOT = Path(__file__).parents[2]
HEAD, SECOND = "10.77.0.1", "10.77.0.2"
NAME, WIRE = "second", "wire"
# $1: where Ray keeps its sockets; two machines do not share it.
BECOME = (
    'hostname "$2" && mkdir -p "$1" && mount -t tmpfs none "$1" && ip link set lo up'
    " && echo ready && exec sleep infinity"
)
TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")
TURNS = 2
FIRST = 400
REPORTED_WITHIN_S = 5.0
# Of long answers most have begun then; one that has not is given to the other machine.
BEGUN_AFTER_S = 0.3


@dataclass(frozen=True, slots=True)
class SecondMachine:
    """What runs on it, and its wire."""

    home: Home

    def set_wire(self, state: str) -> None:
        """Cut the wire, or mend it. state: down or up."""
        run(*self.home.within, "ip", "link", "set", WIRE, state)


def install_tools() -> None:
    """Install what makes networks, where a system has it by apt and we may."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    subprocess.run((ROOT / "tests/packages.sh", "iproute2"), check=True)


def why_impossible() -> str:
    """Return why there can be none; nothing where there can."""
    if not is_alone():
        return "no network of our own"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {missing[0]}"
    try:
        run("ip", "link", "add", WIRE, "type", "veth", "peer", "name", f"{WIRE}-end")
        run("ip", "link", "delete", WIRE)
    except BrokenError as error:
        return str(error)
    return ""


def run(*command: str) -> None:
    """Run a command. Raises BrokenError."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BrokenError(f"{' '.join(command)}: {done.stderr}")


def _give_address(within: Sequence[str], address: str) -> None:
    run(*within, "ip", "address", "add", f"{address}/24", "dev", WIRE)
    run(*within, "ip", "link", "set", WIRE, "up")


@contextmanager
def second_machine(folder: Path) -> Iterator[SecondMachine]:
    """Have it, with a wire to this one, which is HEAD there."""
    folder.mkdir()
    apart = ("unshare", "--net", "--mount", "--uts")
    become = ("sh", "-c", BECOME, "sh", str(session_folder()), NAME)
    with subprocess.Popen([*apart, *become], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                raise BrokenError("there is no second machine")
            within = ("nsenter", f"--target={holder.pid}", "--net", "--mount", "--uts", "--")
            ends = ("peer", "name", WIRE, "netns", str(holder.pid))
            run("ip", "link", "add", WIRE, "type", "veth", *ends)
            _give_address((), HEAD)
            _give_address(within, SECOND)
            yield SecondMachine(Home(folder, within))
        finally:
            holder.kill()


async def two_machines(results: Results, home: Home, second: SecondMachine) -> None:
    """It joins, has a replica, and is cut off under answers."""
    joined = second.home.run("cluster", "join", f"{HEAD}:{HEAD_PORT}", "--key-file", str(home.key))
    good = joined.returncode == 0
    results.check("a join with the key succeeds", good, "" if good else joined.stderr[-300:])
    if not good:
        return
    try:
        status = home.run("cluster", "status").stdout
        results.check("status names the second machine", NAME in status, status.split("\n")[0])
        port = free_port()
        serve = ("cluster", "serve", "demo", "--replicas=2")
        with home.serving(*serve, *flags(port), port=port, says="serving demo on"):
            await _cut_off(results, second, port)
    finally:
        stopped = second.home.run("cluster", "stop")
    results.check("the second machine leaves", stopped.returncode == 0, stopped.stderr[-300:])


async def _cut_off(results: Results, second: SecondMachine, port: int) -> None:
    them = scenes.conversations(FIRST)
    await converse(port, them, TURNS)
    # Replicas say it every second.
    least = sum(its.turns[-1].prompt_tokens for its in them)
    await eventually(lambda: sum(prompt_tokens(port).values()) >= least, REPORTED_WITHIN_S)
    given = prompt_tokens(port)
    both = given.keys() == {socket.gethostname(), NAME}
    both = both and min(given.values()) > max(its.turns[0].prompt_tokens for its in them)
    results.check("both machines had conversations", both, given)
    errors = [turn.error for its in them for turn in its.turns if turn.error]
    results.check("two machines: no answer failed", not errors, errors[:3])
    async with client_of(port) as client:
        asking = asyncio.gather(*(ask(client, its, scenes.LONG_ANSWER, whole=True) for its in them))
        await asyncio.sleep(BEGUN_AFTER_S)
        second.set_wire("down")
        try:
            turns = await asyncio.wait_for(asking, scenes.BACK_WITHIN_S)
            failed = [turn.error for turn in turns if turn.error]
            known = all("replica_lost" in its or "replicas_full" in its for its in failed)
            seen = f"{len(failed)} of {len(turns)} ended with an error"
            results.check("cut off: none silent", known, seen)
            again = await asyncio.gather(*(ask(client, its) for its in them))
            lost = [turn.error for turn in again if turn.error]
            results.check("cut off: conversations go on on the other machine", not lost, lost[:3])
        finally:
            second.set_wire("up")


def prompt_tokens(port: int) -> dict[str, float]:
    """Return what replicas were given, by their machines."""
    found: dict[str, float] = {}
    page = httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=10.0).text
    for line in page.splitlines():
        if line.startswith("quire_replica_prompt_tokens_total{"):
            labels, _, value = line.rpartition(" ")
            host = labels.partition('host="')[2].partition('"')[0]
            found[host] = found.get(host, 0.0) + float(value)
    return found
