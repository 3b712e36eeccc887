"""quire's commands for clusters and servers, run as users do; everything is ended by its number."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import psutil

QUIRE = (sys.executable, "-c", "from server.cli import main; main()")
OTHER_ROUTER = (
    "import sys; from server.cli.cluster.run import serve_cluster; "
    "from server.cluster.scaling import ReplicaCounts; "
    "serve_cluster('demo', ReplicaCounts(3, 3), 3, None, {'server': {'port': int(sys.argv[2])}}, "
    "sys.argv[3:], print, "
    "router=sys.argv[1])"
)
# One replica to two; a calm one ends soon, where users wait for minutes.
BY_NEED = (
    "import sys; from server.cli.cluster.run import serve_cluster; "
    "from server.cluster.scaling import ReplicaCounts; "
    "serve_cluster('demo', ReplicaCounts(1, 2), 2, None, {'server': {'port': int(sys.argv[1])}}, "
    "sys.argv[2:], print, fewer_after_s=2.0)"
)
SETTINGS = (
    "cache.kv_budget=64MiB",
    "cache.substrate=posix",
    "engine.threads=1",
    "log.level=warning",
    "server.drain_s=2",
)
UP_S, END_S = 90.0, 60.0
# RestartSec of the unit, ThrottleInterval of the agent.
SERVICE_RESTART_S = 10.0


class BrokenError(Exception):
    """Something did not happen."""


class Home:
    """A user's folders on one of the machines that we pretend to have."""

    def __init__(self, folder: Path, within: Sequence[str] = ()) -> None:
        """within: the command that runs others on that machine."""
        self.folder = folder
        self.within = within
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "QUIRE_"))
        } | {
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    @property
    def key(self) -> Path:
        """The file of the cluster's key."""
        return self.folder / "state" / "quire" / "cluster" / "key"

    def run(self, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [*self.within, *QUIRE, *arguments],
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )

    @contextmanager
    def serving(
        self,
        *arguments: str,
        port: int,
        command: Sequence[str] = QUIRE,
        says: str = "",
        ready: str = "/ready",
    ) -> Iterator[None]:
        """Run a command that serves, as long as it is wanted. says: what it prints when all of it
        is there. ready: the path that says so."""
        log = self.folder / f"serve-{port}.log"
        with log.open("w") as output:
            child = subprocess.Popen(
                [*command, *arguments],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until_ready(port, child, log, says, ready)
            yield
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise BrokenError(f"{arguments} did not end: {log.read_text()[-2000:]}") from None


def wait_until_ready(
    port: int, child: "subprocess.Popen[bytes]", log: Path, says: str, path: str
) -> None:
    """Until it generates, and has said that it does."""
    ends_at = time.monotonic() + UP_S
    while time.monotonic() < ends_at:
        if child.poll() is not None:
            break
        time.sleep(0.2)
        try:
            status = httpx2.get(f"http://127.0.0.1:{port}{path}", timeout=10.0).status_code
        except httpx2.HTTPError:
            continue
        # Who wants a key says so as soon as it listens.
        if status in (200, 401) and says in log.read_text():
            return
    raise BrokenError(f"nobody serves on port {port}: {log.read_text()[-3000:]}")


@contextmanager
def cluster(home: Home, address: str = "127.0.0.1") -> Iterator[None]:
    """Ray on this machine, by our command."""
    started = home.run("cluster", "start", "--address", address)
    if started.returncode:
        raise BrokenError(f"the cluster did not start: {started.stderr}")
    try:
        yield
    finally:
        stopped = home.run("cluster", "stop")
        if stopped.returncode:
            raise BrokenError(f"the cluster did not stop: {stopped.stderr}")


class Supervised:
    """A command that is started again whenever it ends, as a service manager does."""

    def __init__(self, home: Home, *arguments: str) -> None:
        self._home = home
        self._command = [*QUIRE, *arguments]
        self._ended = threading.Event()
        self._child = self._start()
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with (self._home.folder / "service.log").open("a") as log:
            return subprocess.Popen(
                self._command, env=self._home.environment, stdout=log, stderr=subprocess.STDOUT
            )

    def _keep(self) -> None:
        while not self._ended.wait(0.1):
            if self._child.poll() is not None and not self._ended.wait(SERVICE_RESTART_S):
                self._child = self._start()

    def kill(self) -> int:
        """Kill the command and all that it has started, at once. Returns how many there were."""
        own = psutil.Process(self._child.pid)
        family = [own, *own.children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        return len(family)

    def end(self) -> None:
        """End it for good, as a service manager does."""
        self._ended.set()
        self._thread.join()
        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BrokenError(f"{self._command} did not end") from None


@contextmanager
def supervised(home: Home, *arguments: str) -> Iterator[Supervised]:
    """A command under a service manager."""
    found = Supervised(home, *arguments)
    try:
        yield found
    except BaseException:
        print((home.folder / "service.log").read_text()[-3000:])
        raise
    finally:
        found.end()


def flags(port: int, *further: str) -> list[str]:
    """What each server here is served with."""
    return ["--port", str(port), *(f"--set={its}" for its in (*SETTINGS, *further))]


def replica_processes() -> list[psutil.Process]:
    """Those of Ray's that have engines."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "ServeReplica:quire:replica" in " ".join(process.info["cmdline"] or ()):
            found.append(process)
    return found


def rays_processes() -> list[str]:
    """All of Ray's, by their command lines."""
    lines = [" ".join(its.info["cmdline"] or ()) for its in psutil.process_iter(["cmdline"])]
    return [
        line
        for line in lines
        if line.startswith("ray::") or "/ray/" in line or "ray.scripts" in line
    ]


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def eventually(true: "object", within_s: float) -> float:
    """Wait until a call returns true, and return the seconds. Raises BrokenError."""
    assert callable(true)
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > within_s:
            raise BrokenError(f"not within {within_s:g} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - began
