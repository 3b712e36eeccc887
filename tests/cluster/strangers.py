"""Machines and programs that do not know the cluster's key, by quire's commands and by Ray's."""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2

from server.cli.cluster_folder import ClusterFolder
from server.ray.ray_process import HEAD_PORT, STARTED, environment
from tests.cluster.machines import LOOPBACK, BrokenError, Home, Results

# Long enough to get in; Ray tries for longer where nobody says no.
PATIENCE_S = 12.0
CLIENT_PORT, AGENT_PORT = 10001, 52365
INSIDE = "got in"
START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address")
CONNECT = (
    sys.executable,
    "-c",
    f"import sys, ray; ray.init(sys.argv[1]); ray.nodes(); print({INSIDE!r})",
)


def strangers(results: Results, folder: Path, home: Home) -> None:
    """All of them."""
    head = f"{LOOPBACK}:{HEAD_PORT}"
    _join(results, folder, home, head)
    commands = {
        "ray start": (*START, head),
        "a driver": (*CONNECT, head),
        "a Ray client": (*CONNECT, f"ray://{LOOPBACK}:{CLIENT_PORT}"),
    }
    who = {"without the key": _nothing(home), "with the wrong token": _wrong_token(home)}
    tries = {
        f"{what} {how} is refused": _begun(command, its)
        for how, its in who.items()
        for what, command in commands.items()
    }
    ends_at = time.monotonic() + PATIENCE_S
    for what, child in tries.items():
        said = _ended(child, ends_at)
        results.check(what, INSIDE not in said and STARTED not in said)
    machines = home.run("cluster", "status").stdout.split("\n")[0]
    results.check("nobody has joined", machines.count(",") == 0 and ":" in machines, machines)
    results.check("a job without the key is refused", *_job())
    # Whoever has it gets in the same way: what refuses the others is the key.
    said = _ended(_begun((*CONNECT, head), _known(home)), time.monotonic() + PATIENCE_S)
    results.check("a driver with the key is let in", INSIDE in said, "" if INSIDE in said else said)


def _join(results: Results, folder: Path, home: Home, head: str) -> None:
    stranger = Home(folder / "stranger")
    wrong = stranger.folder / "wrong-key"
    wrong.touch(mode=0o600)
    wrong.write_text(secrets.token_hex(32))
    refused = stranger.run("cluster", "join", head, "--key-file", str(wrong))
    results.check(
        "a join with another key is refused", refused.returncode != 0, refused.stderr[:200]
    )
    wrong.chmod(0o644)
    refused = stranger.run("cluster", "join", head, "--key-file", str(wrong))
    results.check("a key that others may read is refused", "chmod 600" in refused.stderr)
    results.check("the key's own file is nobody else's", home.key.stat().st_mode & 0o077 == 0)


def _nothing(home: Home) -> dict[str, str]:
    return home.environment | {"RAY_USAGE_STATS_ENABLED": "0"}


def _known(home: Home) -> dict[str, str]:
    return home.environment | environment(ClusterFolder(home.key.parent))


def _wrong_token(home: Home) -> dict[str, str]:
    """Return what has the cluster's certificates: then the token alone keeps it out."""
    known = _known(home)
    del known["RAY_AUTH_TOKEN_PATH"]
    return known | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _begun(command: tuple[str, ...], its_environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        env=its_environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _ended(child: "subprocess.Popen[str]", ends_at: float) -> str:
    """Return what a program has said; where it still tries, it is ended with all it has begun."""
    try:
        return child.communicate(timeout=max(0.0, ends_at - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()[0]


def _job() -> tuple[bool, str]:
    """Return whether Ray's agent refuses a job, and what it says. Raises BrokenError where it is
    not there to be asked."""
    url = f"http://{LOOPBACK}:{AGENT_PORT}/api/job_agent/jobs/"
    try:
        answer = httpx2.post(url, json={"entrypoint": "true"}, timeout=PATIENCE_S)
    except httpx2.HTTPError as error:
        raise BrokenError(f"no agent at {url}: {error}") from error
    return answer.status_code in (401, 403), str(answer.status_code)
