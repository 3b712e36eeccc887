"""What the commands of ``quire cluster`` do."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from server.catalogue.hub import find_model
from server.cli.cluster.facts import facts_of
from server.cli.cluster.folder import (
    ClusterError,
    ClusterFolder,
    Node,
    cluster_folder,
    write_own,
)
from server.cli.cluster.key import checked, made_key, read_key
from server.cli.cluster.ray_process import (
    HEAD_PORT,
    address_towards,
    environment,
    join_head,
    running,
    start_head,
    stop,
)
from server.cli.model_files import model_errors
from server.cli.serve import checked_settings
from server.cli.serve_models import plain_settings
from server.cli.settings import with_further
from server.config import AccessSection, Config, Tables

# No machine has it (RFC 5737): the way there is the way to all others.
ELSEWHERE = "192.0.2.1:9"
LOOPBACK = "127.0.0.1"
WATCH_S = 2.0


def start_cluster(address: str | None, port: int | None) -> str:
    """Make this machine the head. Raises ClusterError."""
    folder = cluster_folder()
    key = made_key(folder.key)
    node = start_head(folder, key, address or _own_address(), port or HEAD_PORT)
    return (
        f"this machine is the head of a cluster. On each of the others:\n\n"
        f"  quire cluster join {node.head}\n\n"
        f"It asks for the key, which is in {folder.key}. Whoever has the key can run programs on "
        "all machines of the cluster. Then, here:\n\n"
        "  quire cluster serve MODEL"
    )


def join_cluster(head: str, key_file: Path | None, ask: Callable[[], str]) -> str:
    """Make this machine one of a cluster's. ask: for the key. Raises ClusterError."""
    key = read_key(key_file) if key_file is not None else checked(ask(), "the key")
    folder = cluster_folder()
    write_own(folder.key, key)
    join_head(folder, key, head)
    return f"this machine is in the cluster of {head}; `quire cluster stop` takes it out"


def serve_cluster(
    model: str,
    replicas: int | None,
    per_machine: int,
    file: Path | None,
    flags: Tables,
    further: Iterable[str],
    say: Callable[[str], None],
    router: str | None = None,
) -> None:
    """Serve until told to end. say: tells a person. router: the class that chooses replicas, if
    not ours. Raises StartError."""
    settings = checked_settings(file, with_further(flags, further))
    folder, node = _head()
    with model_errors():
        found = find_model(model, settings.models.folders)
        if found.missing:
            found.fetch_weights()
        facts = facts_of(found.folder)
    os.environ.update(environment(folder))
    from server.cli.cluster.application import (
        ROUTER,
        Plan,
        connected,
        deploy,
        end,
        machines,
        unfit_machines,
    )

    write_own(folder.settings, json.dumps(plain_settings(settings)))
    with connected(node.head):
        plan = Plan(
            model,
            without_secrets(settings),
            str(folder.settings),
            facts,
            per_machine,
            settings.server.ready_timeout_s,
            settings.server.drain_s,
            router or ROUTER,
        )
        there, unfit = machines(), unfit_machines(plan)
        for name, why in unfit.items():
            say(f"no replica on {there.get(name, name)}: {why}")
        most = per_machine * len(there.keys() - unfit.keys())
        wanted = replicas or most
        if not 0 < wanted <= most:
            raise ClusterError(f"there is room for {most} replicas of {model}, not for {wanted}")
        url = deploy(plan, wanted, list(unfit))
        say(f"serving {model} on {url}, by {wanted} replicas; Ctrl-C ends it")
        _wait_for_signal(lambda: running(folder) is not None)
        say("ending")
        end()


def cluster_status() -> str:
    """Say which machines there are, and how the replicas are. Raises ClusterError."""
    folder, node = _head()
    os.environ.update(environment(folder))
    from server.cli.cluster.application import connected, status

    with connected(node.head):
        found = status()
    lines = [f"machines: {', '.join(found['machines'])}"]
    if found["serving"] is None:
        lines.append("nothing is served")
    else:
        counts = ", ".join(f"{count} {state.lower()}" for state, count in found["replicas"].items())
        lines += [f"serving: {found['serving'].lower()}", f"replicas: {counts or 'none'}"]
    return "\n".join([*lines, *([found["message"]] if found.get("message") else [])])


def stop_cluster() -> str:
    """End what runs of a cluster on this machine. Raises ClusterError."""
    if stop(cluster_folder()):
        return "this machine is in no cluster any more"
    return "this machine is in no cluster"


def without_secrets(settings: Config) -> dict[str, object]:
    """Return what replicas know of the settings: who may ask, the front alone has to know."""
    return plain_settings(settings.model_copy(update={"access": AccessSection()}))


def _head() -> tuple[ClusterFolder, Node]:
    folder = cluster_folder()
    node = folder.node()
    if node is None or running(folder) is None:
        raise ClusterError("this machine is in no cluster: `quire cluster start` begins one")
    if not node.is_head:
        raise ClusterError(f"the head of this cluster is {node.head}: it is asked there")
    return folder, node


def _own_address() -> str:
    """Return the address by which this machine goes elsewhere; its own where it goes nowhere."""
    try:
        return address_towards(ELSEWHERE)
    except ClusterError:
        return LOOPBACK


def _wait_for_signal(is_there: Callable[[], bool]) -> None:
    """Wait until told to end. Raises ClusterError where the cluster has ended before."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(WATCH_S):
        if not is_there():
            raise ClusterError("the cluster has ended")
