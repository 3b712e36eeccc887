"""Starts and ends this machine's Ray process, ``ray start --block``, with a key file and TLS."""

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from server.cli.cluster_folder import ClusterError, ClusterFolder, Node
from server.ray.certificates import write_certificates

# Default port of the head (first machine). Ray's workers use the ports from 10002 to 19999.
HEAD_PORT = 26379
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
# Seconds that replicas have to end their requests before their machine leaves the cluster.
LEAVE_S = 20
POLL_S = 0.1
CONNECT_TIMEOUT_S = 10.0
# Small, since Ray's object store only holds large messages, and quire sends small ones.
OBJECT_STORE_BYTES = 100_000_000
STARTED = "Ray runtime started."
COMMAND = (
    *(sys.executable, "-P", "-m", "ray.scripts.scripts"),
    *("start", "--block", "--log-color=false"),
)
LEAN = (
    f"--object-store-memory={OBJECT_STORE_BYTES}",
    "--include-log-monitor=false",
    "--disable-usage-stats",
)
LAST_LINES = 3
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def environment(folder: ClusterFolder) -> dict[str, str]:
    """Return the environment variables for Ray's processes, and for programs that use Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder.key),
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(folder.authority),
        "RAY_TLS_SERVER_CERT": str(folder.certificate),
        "RAY_TLS_SERVER_KEY": str(folder.private_key),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray does not support clusters of Macs, and refuses to start one without this variable.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        # Without this variable, Ray waits for ever for the requests of a hanging replica.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Without this variable, Ray logs requests.
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }


def start_head(folder: ClusterFolder, key: str, address: str, port: int) -> Node:
    """Start a cluster. Other machines reach this one at ``address``. Raises ClusterError."""
    _check_not_running(folder)
    write_certificates(folder, key, own_addresses(address))
    options = [
        "--head",
        f"--node-ip-address={address}",
        f"--port={port}",
        "--include-dashboard=false",
        f"--temp-dir={session_folder()}",
    ]
    return _start(folder, options, f"{address}:{port}", is_head=True)


def join_head(folder: ClusterFolder, key: str, head: str) -> Node:
    """Join a cluster. ``head`` is the HOST:PORT of its first machine. Raises ClusterError."""
    _check_not_running(folder)
    # Ray's processes need the head's IP address, and not a host name.
    address, head = addresses_of(head)
    write_certificates(folder, key, own_addresses(address))
    check_key(folder, head)
    options = [f"--address={head}", f"--node-ip-address={address}"]
    return _start(folder, options, head, is_head=False)


def stop(folder: ClusterFolder) -> bool:
    """End the Ray process and its children. Return False if there was no such process. Raises
    ClusterError if a process does not end."""
    node, process = folder.node(), running(folder)
    # Child processes may still run after the Ray process was killed.
    members = [_find(*member) for member in (node.family if node is not None else ())]
    family = [member for member in members if member is not None]
    if process is not None:
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _wait(family)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    if left := _wait(family):
        raise ClusterError(f"process {left[0].pid} of the cluster does not end")
    if node is not None:
        # Without this call, a Ray process that is a child of this command stays a zombie.
        with suppress(ChildProcessError):
            os.waitpid(node.pid, os.WNOHANG)
    folder.forget_node()
    return bool(family)


def running(folder: ClusterFolder) -> psutil.Process | None:
    """Return this machine's Ray process, or None if it is not running."""
    node = folder.node()
    return None if node is None else _find(node.pid, node.started)


def _find(pid: int, started: float) -> psutil.Process | None:
    """Return the running process with this pid and start time, or None."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == started and _runs(process):
            return process
    return None


def _wait(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Wait until processes have ended. Return the processes that still run after the timeout."""
    ends_at = time.monotonic() + STOP_TIMEOUT_S
    while (left := [each for each in processes if _runs(each)]) and time.monotonic() <= ends_at:
        time.sleep(POLL_S)
    return left


def _runs(process: psutil.Process) -> bool:
    """Return True if a process is running. A zombie counts as ended."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def own_addresses(address: str) -> list[str]:
    """Return all names and addresses of this machine, of which ``address`` is one."""
    numbers = [
        each.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [address, "localhost", socket.gethostname(), *numbers]


def addresses_of(head: str) -> tuple[str, str]:
    """Return this machine's IP address in the head's network, and the head's address as IP:PORT.
    Send no packet to the head. Raises ClusterError."""
    host, _, port = head.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            peer, number = probe.getpeername()
            return str(probe.getsockname()[0]), f"{peer}:{number}"
    except (OSError, ValueError) as error:
        raise ClusterError(f"{head}: {error}; the head is written HOST:PORT") from error


def check_key(folder: ClusterFolder, head: str) -> None:
    """Raise ClusterError if the head does not answer, or if TLS fails because its key differs."""
    host, _, port = head.rpartition(":")
    context = ssl.create_default_context(cafile=folder.authority)
    context.load_cert_chain(folder.certificate, folder.private_key)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return
    except ssl.SSLError as error:
        raise ClusterError(f"{head} has another key than this one, or is no cluster") from error
    except OSError as error:
        raise ClusterError(f"{head} does not answer: {error}") from error


def session_folder() -> Path:
    """Return the folder for Ray's sockets and logs. The path of a socket must be short."""
    return Path(f"/tmp/quire-ray-{os.getuid()}")  # noqa: S108


def _check_not_running(folder: ClusterFolder) -> None:
    if running(folder) is not None:
        raise ClusterError("this machine is in a cluster: `quire cluster stop` ends that")
    # The children of a killed Ray process may still hold its ports.
    stop(folder)


def _start(folder: ClusterFolder, options: Sequence[str], head: str, *, is_head: bool) -> Node:
    # RAY_ variables that the user has set would change Ray's behaviour in the cluster.
    inherited = {name: each for name, each in os.environ.items() if not name.startswith("RAY_")}
    drain = {DRAIN: "0" if is_head else str(LEAVE_S)}
    with folder.log.open("wb") as log:
        child = subprocess.Popen(
            [*COMMAND, *options, *LEAN],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=inherited | environment(folder) | drain,
            start_new_session=True,
        )
    node = Node(child.pid, psutil.Process(child.pid).create_time(), head, is_head)
    folder.write_node(node)
    ends_at = time.monotonic() + START_TIMEOUT_S
    while STARTED not in folder.log.read_text(errors="replace"):
        if child.poll() is not None:
            folder.forget_node()
            lines = [line.strip() for line in folder.log.read_text(errors="replace").splitlines()]
            reason = " ".join([*filter(None, lines)][-LAST_LINES:]) or f"see {folder.log}"
            raise ClusterError(f"Ray did not start: {reason}")
        if time.monotonic() > ends_at:
            stop(folder)
            child.wait()
            raise ClusterError(f"Ray did not start within {START_TIMEOUT_S:g} s: see {folder.log}")
        time.sleep(POLL_S)
    child.returncode = 0  # else Popen warns that the process outlives this command
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(child.pid).children(recursive=True)
        node = replace(node, family=tuple((each.pid, each.create_time()) for each in children))
        folder.write_node(node)
    return node
