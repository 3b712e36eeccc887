"""The process by which a machine is in a cluster: ``ray start --block``, with the key in a file,
TLS on and usage statistics off."""

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

# Not among the ports that Ray gives its workers, 10002 to 19999.
HEAD_PORT = 26379
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
# Of a machine that leaves: its replica's requests may end. The head takes all with it.
LEAVE_S = 20
POLL_S = 0.1
CONNECT_TIMEOUT_S = 10.0
# What is larger than a message goes through it; answers are not.
OBJECT_STORE_BYTES = 100_000_000
STARTED = "Ray runtime started."
COMMAND = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-color=false")
LEAN = (
    f"--object-store-memory={OBJECT_STORE_BYTES}",
    "--include-log-monitor=false",
    "--disable-usage-stats",
)
LAST_LINES = 3
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def environment(folder: ClusterFolder) -> dict[str, str]:
    """Return the environment of Ray's processes, and of programs that talk to them."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder.key),
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(folder.authority),
        "RAY_TLS_SERVER_CERT": str(folder.certificate),
        "RAY_TLS_SERVER_KEY": str(folder.private_key),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray calls clusters of Macs unsupported, and asks for this.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        # Its requests do not end: they would be waited for.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # What is written to its logs about requests is nobody's.
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }


def start_head(folder: ClusterFolder, key: str, address: str, port: int) -> Node:
    """Begin a cluster. address: of this machine, which others reach. Raises ClusterError."""
    _check_not_running(folder)
    write_certificates(folder, key, own_addresses(address))
    options = [
        "--head",
        f"--node-ip-address={address}",
        f"--port={port}",
        "--include-dashboard=false",
        f"--temp-dir={session_folder()}",
    ]
    return _start(folder, [*COMMAND, *options, *LEAN], f"{address}:{port}", is_head=True)


def join_head(folder: ClusterFolder, key: str, head: str) -> Node:
    """Join a cluster. head: its address, HOST:PORT. Raises ClusterError."""
    _check_not_running(folder)
    # Ray's processes do not find a head by its name.
    address, head = addresses_of(head)
    write_certificates(folder, key, own_addresses(address))
    check_key(folder, head)
    options = [f"--address={head}", f"--node-ip-address={address}"]
    return _start(folder, [*COMMAND, *options, *LEAN], head, is_head=False)


def stop(folder: ClusterFolder) -> bool:
    """End what was started here, and all that it has started. False where nothing runs. Raises
    ClusterError where it does not end."""
    node, process = folder.node(), running(folder)
    # Of a process that was killed all of it may be left.
    known = [_known(*its) for its in (node.family if node is not None else ())]
    family = [its for its in known if its is not None]
    if process is not None:
        family = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _left(family)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    if left := _left(family):
        raise ClusterError(f"process {left[0].pid} of the cluster does not end")
    if node is not None:
        # Where it was a child of ours; commands leave it to the system.
        with suppress(ChildProcessError):
            os.waitpid(node.pid, os.WNOHANG)
    folder.forget_node()
    return bool(family)


def running(folder: ClusterFolder) -> psutil.Process | None:
    """Return the process that was started here, if it runs."""
    node = folder.node()
    return None if node is None else _known(node.pid, node.started)


def _known(pid: int, started: float) -> psutil.Process | None:
    """Return a process that was started then, if it runs."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == started and _runs(process):
            return process
    return None


def _left(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Wait until processes have ended, and return those that have not in time."""
    ends_at = time.monotonic() + STOP_TIMEOUT_S
    while (left := [its for its in processes if _runs(its)]) and time.monotonic() <= ends_at:
        time.sleep(POLL_S)
    return left


def _runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended; a zombie has."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def own_addresses(address: str) -> list[str]:
    """Return all names and addresses of this machine. address: by which others reach it."""
    found = [
        its.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for its in interface
        if its.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [address, "localhost", socket.gethostname(), *found]


def addresses_of(head: str) -> tuple[str, str]:
    """Return the address of this machine that a head sees, and the head's as HOST:PORT, both in
    numbers. Sends nothing but a question for a name. Raises ClusterError."""
    host, _, port = head.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            its, number = probe.getpeername()
            return str(probe.getsockname()[0]), f"{its}:{number}"
    except (OSError, ValueError) as error:
        raise ClusterError(f"{head}: {error}; the head is written HOST:PORT") from error


def check_key(folder: ClusterFolder, head: str) -> None:
    """Raise ClusterError where the head does not answer, or its key is another one: then we do not
    trust its certificate, nor does it ours."""
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
    """Return where Ray keeps sockets and logs: short, as the names of sockets are limited."""
    return Path(f"/tmp/quire-ray-{os.getuid()}")  # noqa: S108


def _check_not_running(folder: ClusterFolder) -> None:
    if running(folder) is not None:
        raise ClusterError("this machine is in a cluster: `quire cluster stop` ends that")
    # What a killed one has left behind has its ports.
    stop(folder)


def _start(folder: ClusterFolder, command: Sequence[str], head: str, *, is_head: bool) -> Node:
    drain_s = "0" if is_head else str(LEAVE_S)
    # Settings of Ray's are ours.
    inherited = {name: its for name, its in os.environ.items() if not name.startswith("RAY_")}
    with folder.log.open("wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=inherited | environment(folder) | {DRAIN: drain_s},
            start_new_session=True,
        )
    node = Node(child.pid, psutil.Process(child.pid).create_time(), head, is_head)
    folder.keep_node(node)
    ends_at = time.monotonic() + START_TIMEOUT_S
    while STARTED not in folder.log.read_text(errors="replace"):
        if child.poll() is not None:
            folder.forget_node()
            raise ClusterError(f"Ray did not start: {_why(folder.log)}")
        if time.monotonic() > ends_at:
            stop(folder)
            child.wait()
            raise ClusterError(f"Ray did not start within {START_TIMEOUT_S:g} s: see {folder.log}")
        time.sleep(POLL_S)
    child.returncode = 0  # it outlives this command, which does not wait for it
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(child.pid).children(recursive=True)
        node = replace(node, family=tuple((its.pid, its.create_time()) for its in children))
        folder.keep_node(node)
    return node


def _why(log: Path) -> str:
    """Return the last lines of Ray's log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return " ".join([line for line in lines if line][-LAST_LINES:]) or f"see {log}"
