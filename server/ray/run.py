"""Implements the commands of ``quire cluster``."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from server.catalogue.hub import find_model
from server.cli.cluster_folder import (
    ClusterError,
    ClusterFolder,
    Node,
    cluster_folder,
    ensure_key,
    parse_key,
    read_key,
    write_private,
)
from server.cli.model_files import model_errors, new_reader
from server.cli.serve import begin_serving
from server.cli.serve_models import plain_settings
from server.cli.settings import read_settings, with_further
from server.config import Tables
from server.ray.machines import WATCH_S, MachineWatcher, ReplicaCounts
from server.ray.ray_process import (
    HEAD_PORT,
    addresses_of,
    environment,
    join_head,
    running,
    start_head,
    stop,
)
from server.ray.replica import facts_of

# No machine has this address (RFC 5737). A socket connected to it has this machine's address.
ELSEWHERE = "192.0.2.1:9"
LOOPBACK = "127.0.0.1"
JOIN_AGAIN_S = 5.0
Say = Callable[[str], None]
AskKey = Callable[[], str]


def start_cluster(address: str | None, port: int | None) -> str:
    """Make this machine a cluster's head (first machine). Return instructions for the user. Raises
    ClusterError."""
    folder = cluster_folder()
    key = ensure_key(folder.key)
    node = start_head(folder, key, address or _own_address(), port or HEAD_PORT)
    return (
        f"this machine is the head of a cluster. On each of the others:\n\n"
        f"  quire cluster join {node.head}\n\n"
        f"It asks for the key, which is in {folder.key}. Whoever has the key can run programs on "
        "all machines of the cluster. Then, here:\n\n"
        "  quire cluster serve MODEL"
    )


def join_cluster(head: str, key_file: Path | None, ask: AskKey) -> str:
    """Make this machine a member of the head's cluster. Raises ClusterError."""
    join_head(*_store_key(key_file, ask), head)
    return f"this machine is in the cluster of {head}; `quire cluster stop` takes it out"


def _store_key(key_file: Path | None, ask: AskKey) -> tuple[ClusterFolder, str]:
    """Store the key from ``key_file`` or ``ask()``. Return the cluster's folder and the key."""
    key = read_key(key_file) if key_file is not None else parse_key(ask(), "the key")
    folder = cluster_folder()
    write_private(folder.key, key)
    return folder, key


def stay_in_cluster(head: str, key_file: Path | None, ask: AskKey, say: Say) -> None:
    """Join a cluster, and join again after its end, until a signal comes. Raises ClusterError."""
    folder, key = _store_key(key_file, ask)
    stop(folder)
    ended, last = ended_by_signal(), ""
    while not ended.is_set():
        try:
            began = time.monotonic()
            join_head(folder, key, head)
            last = f"in the cluster of {head}, after {time.monotonic() - began:.0f} s"
            say(last)
            while running(folder) is not None and not ended.wait(WATCH_S):
                pass
            if not ended.is_set():
                say(f"the cluster of {head} has ended; joining it again")
        except ClusterError as error:
            if str(error) != last:
                last = str(error)
                say(last)
        ended.wait(JOIN_AGAIN_S)
    stop(folder)


def serve_from_start(
    address: str | None, port: int | None, serve: Callable[[], None], say: Say
) -> None:
    """Start a new cluster, call ``serve``, and end the cluster. Raises StartError."""
    folder = cluster_folder()
    signal.signal(signal.SIGTERM, _exit)
    if stop(folder):
        say("what was left of a cluster here has been ended")
    try:
        start_cluster(address, port)
        serve()
    finally:
        stop(folder)


def serve_cluster(
    model: str,
    replicas: ReplicaCounts | None,
    per_machine: int,
    file: Path | None,
    flags: Tables,
    further: Iterable[str],
    say: Say,
    *,
    waits: bool = False,
) -> None:
    """Serve a model until a signal. If ``waits``, start once a replica fits. Raises StartError."""
    settings = read_settings(file, with_further(flags, further))
    begin_serving(settings)
    folder, node = _head()
    with model_errors(), new_reader(settings) as reader:
        model_files = find_model(model, settings.models.folders, reader=reader)
        if model_files.missing:
            model_files.fetch_weights()
        facts = facts_of(model_files.folder)
    os.environ.update(environment(folder))
    from server.ray import application

    write_private(folder.settings, json.dumps(plain_settings(settings)))
    with application.connected(node.head):
        plan = application.Plan(model, settings, folder.settings, facts, per_machine)
        watcher = MachineWatcher(application, plan, replicas, say)
        watcher.look()
        while waits and not watcher.room:
            time.sleep(WATCH_S)
            _check_running(folder)
            watcher.look()
        least = replicas.minimum if replicas is not None and not waits else 1
        if watcher.room < least:
            raise ClusterError(f"there is room for {watcher.room} replicas of {model}, not {least}")
        url = application.deploy(plan, watcher.counts, watcher.unfit)
        ended = ended_by_signal()
        say(f"serving {model} on {url}, by {watcher.counts} replicas; Ctrl-C ends it")
        threading.Thread(target=watcher.keep_looking, args=(ended,), daemon=True).start()
        try:
            while not ended.wait(WATCH_S):
                _check_running(folder)
        finally:
            ended.set()
        say("ending")
        application.end()


def cluster_status() -> str:
    """Return a text for the user about the machines and replicas. Raises ClusterError."""
    folder, node = _head()
    os.environ.update(environment(folder))
    from server.ray import application

    with application.connected(node.head):
        return application.status()


def stop_cluster() -> str:
    """Take this machine out of its cluster. Return a sentence for the user. Raises ClusterError."""
    if stop(cluster_folder()):
        return "this machine is in no cluster any more"
    return "this machine is in no cluster"


def _head() -> tuple[ClusterFolder, Node]:
    folder = cluster_folder()
    node = folder.node()
    if node is None or running(folder) is None:
        raise ClusterError("this machine is in no cluster: `quire cluster start` begins one")
    if not node.is_head:
        raise ClusterError(f"the head of this cluster is {node.head}: it is asked there")
    return folder, node


def _own_address() -> str:
    """Return this machine's address for other machines, or 127.0.0.1 without a network."""
    try:
        return addresses_of(ELSEWHERE)[0]
    except ClusterError:
        return LOOPBACK


def ended_by_signal() -> threading.Event:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _check_running(folder: ClusterFolder) -> None:
    if running(folder) is None:
        raise ClusterError("the cluster has ended")
