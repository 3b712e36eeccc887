"""quire's commands for clusters and servers, run as users do; everything is ended by its number."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil

QUIRE = (sys.executable, "-c", "from server.cli import main; main()")
SETTINGS = (
    "cache.kv_budget=64MiB",
    "cache.kv_backend=posix",
    "engine.threads=1",
    "log.level=warning",
    "server.drain_s=30",
)
LOOPBACK = "127.0.0.1"
UP_S, END_S = 180.0, 60.0


class BrokenError(Exception):
    """Something did not happen."""


class Results:
    """Prints checks as they are made."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def check(self, what: str, good: bool, seen: object = "") -> None:
        """Print a line; a bad one fails the run."""
        self.passed += good
        self.failed += not good
        print(f"{'ok    ' if good else 'FAILED'}  {what}{f': {seen}' if seen else ''}", flush=True)


class Home:
    """A user's folders."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
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
            [*QUIRE, *arguments],
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )

    @contextmanager
    def serving(
        self, *arguments: str, port: int, says: str = ""
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a command that serves, as long as it is wanted. says: what it prints when all of it
        is there."""
        log = self.folder / f"serve-{port}.log"
        with log.open("w") as output:
            child = subprocess.Popen(
                [*QUIRE, *arguments],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until_ready(port, child, log, says)
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise BrokenError(f"{arguments} did not end: {log.read_text()[-2000:]}") from None


def wait_until_ready(port: int, child: "subprocess.Popen[bytes]", log: Path, says: str) -> None:
    """Until it generates, and has said that it does."""
    ends_at = time.monotonic() + UP_S
    while time.monotonic() < ends_at:
        if child.poll() is not None:
            break
        time.sleep(0.2)
        try:
            status = httpx2.get(f"http://127.0.0.1:{port}/ready", timeout=10.0).status_code
        except httpx2.HTTPError:
            continue
        # A server with keys answers 401 as soon as it listens.
        if status in (200, 401) and says in log.read_text():
            return
    raise BrokenError(f"nobody serves on port {port}: {log.read_text()[-3000:]}")


@contextmanager
def cluster(home: Home) -> Iterator[None]:
    """Ray on this machine, by our command."""
    started = home.run("cluster", "start", "--address", LOOPBACK)
    if started.returncode:
        raise BrokenError(f"the cluster did not start: {started.stderr}")
    try:
        yield
    finally:
        stopped = home.run("cluster", "stop")
        if stopped.returncode:
            raise BrokenError(f"the cluster did not stop: {stopped.stderr}")


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


async def eventually(true: Callable[[], bool], within_s: float) -> float:
    """Wait until a call returns true, and return the seconds. Raises BrokenError."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > within_s:
            raise BrokenError(f"not within {within_s:g} s")
        await asyncio.sleep(0.1)
    return time.monotonic() - began
