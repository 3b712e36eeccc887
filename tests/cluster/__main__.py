"""A real cluster on this machine, by quire's own commands: ``python -m tests.cluster``."""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from server.cli.cluster.ray_process import HEAD_PORT
from tests.cluster import scenes
from tests.cluster.conversations import Conversation, converse
from tests.cluster.gateway import behind_gateway, install
from tests.cluster.machines import (
    BY_NEED,
    OTHER_ROUTER,
    UP_S,
    BrokenError,
    Home,
    cluster,
    eventually,
    flags,
    free_port,
    rays_processes,
    supervised,
)
from tests.cluster.namespace import enter, is_alone
from tests.cluster.results import Results
from tests.cluster.second_machine import (
    HEAD,
    SecondMachine,
    install_tools,
    second_machine,
    two_machines,
    why_impossible,
)
from tests.cluster.strangers import strangers

POW_2 = "ray.serve._private.request_router.pow_2_router:PowerOfTwoChoicesRequestRouter"
CHARACTERS = "tests.cluster.other_routers:CharacterRouter"
# Of one replica, so that a crowd fills all of them.
SMALL = ("engine.max_num_seqs=4", "limits.max_queued_requests=8")
CROWD = 80
LOOPBACK = "127.0.0.1"
SERVING = "serving demo on"
KEYS = ("sk-one-0123456789", "sk-two-0123456789")
SHARED_MEMORY = Path("/dev/shm")


# Minutes, most of them Ray's own: it is asked for by name.
SLOW = "services"
# What ours is compared with.
OTHERS = ("routers", "gateway")
PARTS = ("three-replicas", "small-replicas", "by-need", "two-machines", *OTHERS, SLOW)


def main() -> None:
    """Run, and end with 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = f"a part of it, may be repeated; without it all but {SLOW}"
    parser.add_argument("--only", choices=PARTS, action="append", help=what)
    parser.add_argument("--ours", action="store_true", help="without others' routers and gateways")
    options = parser.parse_args()
    left_out = {SLOW, *OTHERS} if options.ours else {SLOW}
    parts = options.only or [part for part in PARTS if part not in left_out]
    if not is_alone():
        install_tools()
        if "gateway" in parts:
            install()
    if (code := enter(sys.argv[1:])) is not None:
        sys.exit(code)
    began = time.monotonic()
    results = Results()
    before = set(os.listdir(SHARED_MEMORY))
    with tempfile.TemporaryDirectory(prefix="quire-cluster-") as folder:
        asyncio.run(run(results, Path(folder), parts))
    results.check("all processes have ended", not rays_processes(), rays_processes()[:3])
    left = set(os.listdir(SHARED_MEMORY)) - before
    results.check("no shared memory is left", not left, left)
    results.print_table()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(results.failed > 0)


async def run(results: Results, folder: Path, parts: Sequence[str]) -> None:
    """All scenes of these parts."""
    for part in parts:
        if part == SLOW:
            with noted(results, part):
                await services(results, folder)
    if quick := [part for part in parts if part != SLOW]:
        await beside_a_server(results, folder, quick)


async def beside_a_server(results: Results, folder: Path, parts: Sequence[str]) -> None:
    """Parts on one Ray, whose answers are compared with those of a server that is alone."""
    home, alone = Home(folder / "head"), Home(folder / "alone")
    for its in (home, alone):
        its.folder.mkdir()
    with ExitStack() as stack:
        second: SecondMachine | None = None
        address = LOOPBACK
        if why := why_impossible():
            print(f"skipped: a second machine: {why}")
        else:
            second = stack.enter_context(second_machine(folder / "second"))
            address = HEAD
        direct_port = free_port()
        stack.enter_context(alone.serving("serve", "demo", *flags(direct_port), port=direct_port))
        stack.enter_context(cluster(home, address))
        reference = scenes.conversations()
        await converse(direct_port, reference, scenes.TURNS)
        strangers(results, folder, home, address)
        for part in parts:
            with noted(results, part):
                if part == "three-replicas":
                    await ours(results, home, direct_port, reference)
                elif part == "small-replicas":
                    await guarded(results, home)
                elif part == "by-need":
                    await by_need(results, home)
                elif part == "two-machines" and second is not None:
                    await two_machines(results, home, second)
                elif part == "routers":
                    await others(results, home, reference)
                elif part == "gateway":
                    with behind_gateway(alone) as port:
                        await scenes.affinity(results, "gateway", port, reference)


@contextmanager
def noted(results: Results, name: str) -> Iterator[None]:
    """Note what did not happen as a failed check, and go on behind it."""
    try:
        yield
    except BrokenError as error:
        results.check(name, False, error)


async def ours(
    results: Results, home: Home, direct_port: int, reference: list[Conversation]
) -> None:
    """quire's own router: what a user gets."""
    port = free_port()
    serve = ("cluster", "serve", "demo", "--replicas=3", "--per-machine=3")
    with home.serving(*serve, *flags(port), port=port, says=SERVING):
        await scenes.affinity(results, "quire", port, reference)
        await scenes.first_tokens(results, port, direct_port)
        status = home.run("cluster", "status")
        results.check("status names the replicas", "3 running" in status.stdout, status.stderr)
        for sign, first in ((signal.SIGKILL, 100), (signal.SIGSTOP, 200)):
            with noted(results, sign.name):
                await scenes.failure(results, port, sign, first)
        with noted(results, "stopped while it starts"):
            await scenes.stopped_start(results, port)


async def guarded(results: Results, home: Home) -> None:
    """Small replicas, and keys."""
    port = free_port()
    serve = ("cluster", "serve", "demo", "--replicas=3", "--per-machine=3")
    keys = f"access.api_keys={','.join(KEYS)}"
    share = "limits.max_key_share_ratio=1"
    with home.serving(*serve, *flags(port, *SMALL, keys, share), port=port, says=SERVING):
        await scenes.tenants(results, port, KEYS)
        await scenes.crowd(results, port, CROWD, KEYS[0])


async def by_need(results: Results, home: Home) -> None:
    """One small replica, or two."""
    port = free_port()
    with home.serving(
        str(port),
        *(its.removeprefix("--set=") for its in flags(port, *SMALL)[2:]),
        port=port,
        command=(sys.executable, "-c", BY_NEED),
        says=SERVING,
    ):
        await scenes.scaling(results, port)


async def services(results: Results, folder: Path) -> None:
    """A head and a member as their services run them, and the head killed."""
    head, member = Home(folder / "service-head"), Home(folder / "service-member")
    for its in (head, member):
        its.folder.mkdir()
    port, address = free_port(), "127.0.0.1"
    serve = ("cluster", "serve", "demo", "--start", "--address", address)
    with supervised(head, *serve, *flags(port)) as service:
        await eventually(head.key.exists, UP_S)
        join = ("cluster", "join", f"{address}:{HEAD_PORT}", "--stay", "--key-file", str(head.key))
        with supervised(member, *join):
            await scenes.restarted_head(results, service, port, members=2)


async def others(results: Results, home: Home, reference: list[Conversation]) -> None:
    """The same replicas behind Ray's own routers."""
    for name, router in (("Ray, power of two", POW_2), ("Ray, prefixes", CHARACTERS)):
        port = free_port()
        command = (sys.executable, "-c", OTHER_ROUTER)
        arguments = [router, str(port), *flags(port)[2:]]
        with home.serving(
            *[its.removeprefix("--set=") for its in arguments],
            port=port,
            command=command,
            says=SERVING,
        ):
            await scenes.affinity(results, name, port, reference)


if __name__ == "__main__":
    main()
