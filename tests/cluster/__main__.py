"""A real cluster on this machine, by quire's own commands: ``python -m tests.cluster``."""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster import scenes
from tests.cluster.conversations import converse
from tests.cluster.machines import (
    BrokenError,
    Home,
    Results,
    cluster,
    flags,
    free_port,
    rays_processes,
)
from tests.cluster.namespace import enter
from tests.cluster.strangers import strangers

SHARED_MEMORY = Path("/dev/shm")
SERVING = "serving demo on"
KEYS = ("sk-one-0123456789", "sk-two-0123456789")
# Of one replica, so that a crowd fills all of them.
SMALL = ("engine.max_num_seqs=4", "limits.max_queued_requests=8")


def main() -> None:
    """Run, and end with 1 where something is not as it should be."""
    if (code := enter()) is not None:
        sys.exit(code)
    began = time.monotonic()
    results = Results()
    before = set(SHARED_MEMORY.iterdir())
    with tempfile.TemporaryDirectory(prefix="quire-cluster-") as folder:
        try:
            asyncio.run(run(results, Path(folder)))
        except BrokenError as error:
            results.check("all scenes end", False, error)
    results.check("all processes have ended", not rays_processes(), rays_processes()[:3])
    left = set(SHARED_MEMORY.iterdir()) - before
    results.check("no shared memory is left", not left, left)
    print(f"{results.passed} passed, {results.failed} failed; {time.monotonic() - began:.0f} s")
    sys.exit(results.failed > 0)


async def run(results: Results, folder: Path) -> None:
    """All scenes. Answers are compared with those of a server that is alone."""
    home, alone = Home(folder / "head"), Home(folder / "alone")
    with cluster(home):
        direct = free_port()
        reference = scenes.conversations()
        with alone.serving("serve", "demo", *flags(direct), port=direct):
            await converse(direct, reference, scenes.TURNS)
        strangers(results, folder, home)
        port = free_port()
        serve = ("cluster", "serve", "demo", "--replicas=3", "--per-machine=3")
        with home.serving(*serve, *flags(port), port=port, says=SERVING) as serving:
            await scenes.affinity(results, port, reference)
            status = home.run("cluster", "status")
            results.check("status names the replicas", "3 running" in status.stdout, status.stderr)
            await scenes.killed(results, port)
            await scenes.stopped(results, port)
            await scenes.drained(results, port, serving)
        port = free_port()
        serve = ("cluster", "serve", "demo", "--replicas=1-2", "--per-machine=2")
        keys = (f"access.api_keys={','.join(KEYS)}", "limits.max_key_share_ratio=1")
        with home.serving(*serve, *flags(port, *SMALL, *keys), port=port, says=SERVING):
            await scenes.tenants(results, port, KEYS)
            await scenes.crowd(results, port, KEYS[0])


if __name__ == "__main__":
    main()
