"""Runs docker/compose.cluster.yaml without Docker: ``python -m tests.docker.cluster``.

It needs root, Ray in this environment, unshare, setpriv and ip. Each service has a network, a host
name, processes, /tmp, /dev/shm and secrets of its own, and runs as the image's user with the
command, environment and script of the file. Not tried: the image, the limits, a root that cannot be
written, Docker's names and restarts; names stand in /etc/hosts, and programs are this checkout's.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import yaml  # type: ignore[import-untyped]

from tests.docker.boards import DOCKER, ROOT, targets
from tests.docker.live import OF_A_CLUSTER, shows
from tests.docker.prometheus import scraping

COMPOSE = DOCKER / "compose.cluster.yaml"
INSIDE = "COMPOSE_GATE_IS_ALONE"
USER = 10001
NETWORK = "10.77.0"
HEAD = "quire-head"
REPLICAS = 3
UP_S, END_S, POLL_S = 150.0, 110.0, 0.5
LOAD_S, CLIENTS = 12.0, 24
VALUES = {"QUIRE_API_KEYS": "the-key-of-its-clients", "QUIRE_SCRAPE_KEY": "a-key-that-scrapes"}
# Three replicas are on one machine here.
SMALL = {
    "QUIRE_CACHE__KV_BUDGET": "64MiB",
    "QUIRE_CACHE__KV_BACKEND": "posix",
    "QUIRE_ENGINE__THREADS": "1",
    "QUIRE_ENGINE__MAX_NUM_SEQS": "4",
    "QUIRE_SERVER__HOST": "0.0.0.0",  # as the image has it
    "QUIRE_SERVER__PORT": "8000",
}
# $1 to $5: host name, address, folder of files, user, where Python is; then the command. It begins
# when its link is there.
SETUP = """
read -r go
hostname "$1"
mount -t proc proc /proc
mount --bind "$3/hosts" /etc/hosts
mount -t tmpfs -o size=256m,mode=1777 tmpfs /dev/shm
mount -t tmpfs tmpfs /run && install -D -m 600 -o "$4" -g "$4" "$3/key" /run/secrets/cluster_key
case $5 in
/root/*)  # where that user may not look
  mount --bind "$5" /mnt && mount -t tmpfs -o mode=755 tmpfs /root
  mkdir -p "$5" && mount --bind /mnt "$5"
  ;;
esac
mount -t tmpfs -o "uid=$4,gid=$4,mode=1700" tmpfs /tmp
ip link set lo up && ip address add "$2/24" dev eth0 && ip link set eth0 up
ip route add default via "${2%.*}.1"
user=$4; shift 5
exec setpriv --reuid="$user" --regid="$user" --clear-groups --no-new-privs \\
  --bounding-set=-all --inh-caps=-all "$@"
"""


def filled(text: str) -> str:
    """Replace the variables in a value of the file."""
    return re.sub(
        r"\$\{(\w+)(?::[-?]([^}]*))?\}",
        lambda found: VALUES.get(found[1], found[2] or ""),
        text,
    )


class Machine:
    def __init__(self, name: str, service: dict[str, Any], number: int, folder: Path) -> None:
        self.name = name
        self.address = f"{NETWORK}.{10 + number}"
        self.log = folder / f"{name}.log"
        words = [filled(word) for word in service["command"]]
        command = ["sh", str(DOCKER / "cluster.sh"), *words]
        path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {key: filled(value) for key, value in service["environment"].items()}
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
        setup = ["sh", "-ec", SETUP, "sh", name, self.address, str(folder), str(USER)]
        setup.append(sys.base_prefix)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["unshare", *spaces, *setup, *command],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd="/",
                env={"PATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | SMALL | variables,
            )  # fmt: skip
        self._link(number)

    def _link(self, number: int) -> None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.05)
        self.first = int(found[0])
        ip("link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0",
           "netns", str(self.first))  # fmt: skip
        ip("link", "set", f"v{number}", "master", "bridge", "up")
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def has_begun(self) -> bool:
        """Return whether its log says how others join."""
        return "quire cluster join" in self.log.read_text()

    def end(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """End it as Docker would, and return its exit code."""
        if self.process.poll() is None:
            os.kill(self.first, sign)
        return self.process.wait(END_S)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def check(name: str, good: bool, seen: object = "") -> None:
    """Print a result. Raises AssertionError where it is bad."""
    print(f"{'ok  ' if good else 'FAIL'} {name} {seen}", flush=True)
    assert good, name


def eventually(what: str, true: Callable[[], bool], machines: list[Machine]) -> None:
    """Wait until it is true. Raises AssertionError."""
    began = time.monotonic()
    while time.monotonic() - began < UP_S:
        gone = [its.name for its in machines if its.process.poll() is not None]
        assert not gone, f"{gone} ended"
        try:
            if true():
                check(what, True, f"after {time.monotonic() - began:.0f} s")
                return
        except httpx2.HTTPError:
            pass
        time.sleep(POLL_S)
    check(what, False)


def run(folder: Path) -> None:
    """Start all services, use them, and end them."""
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge", "type", "bridge")
    ip("address", "add", f"{NETWORK}.1/24", "dev", "bridge")
    ip("link", "set", "bridge", "up")
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    hosts = [f"{NETWORK}.{10 + number} {name}" for number, name in enumerate(services)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
    subprocess.run(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"], check=True)
    (folder / "key").write_text(secrets.token_hex(32))
    machines: list[Machine] = []
    try:
        for number, (name, service) in enumerate(services.items()):
            machines.append(Machine(name, service, number, folder))
            if name == HEAD:
                # Docker starts those again that come before the cluster is there.
                eventually("the head begins", machines[0].has_begun, machines)
        ask(machines)
        key = (folder / "key").read_text()
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        check("the key is in no command line", not any(key.encode() in line for line in lines))
        check("a machine that is told to leaves", machines[2].end() == 143)
        check("the head ends when it is told to", machines[0].end() == 0)
        check("the machines that are left end too", machines[1].process.wait(END_S) != 0)
    except BaseException:
        for its in machines:
            print(f"--- {its.name}\n{its.log.read_text()[-3000:]}")
        raise
    finally:
        for its in machines:
            its.process.kill()


def ask(machines: list[Machine]) -> None:
    """Send what clients, the page and Prometheus send."""
    head = f"http://{machines[0].address}:8000"
    key = {"Authorization": f"Bearer {VALUES['QUIRE_API_KEYS']}", "Host": f"{HEAD}:8000"}
    with httpx2.Client(base_url=head, headers=key, timeout=30.0, trust_env=False) as client:

        def replicas() -> list[dict[str, Any]]:
            answer = client.get("/cluster/replicas")
            found: list[dict[str, Any]] = answer.json()["replicas"]
            return found

        def all_up() -> bool:
            return [its["state"] for its in replicas()] == ["up"] * REPLICAS

        eventually("three replicas are listed and answer", all_up, machines)
        hosts = sorted(its["host"] for its in replicas())
        check("one on each machine", hosts == sorted(its.name for its in machines), hosts)
        body = {"messages": [{"role": "user", "content": "What is quire?"}], "max_tokens": 8}
        answer = client.post("/v1/chat/completions", json=body)
        check("a chat is answered", answer.status_code == 200, json.dumps(answer.json())[:120])
        begun_s = time.time()
        with scraping(f"{HEAD}:8000", VALUES["QUIRE_SCRAPE_KEY"]) as prometheus:
            load(client, time.monotonic() + LOAD_S)
            queries = [its for its in targets() if OF_A_CLUSTER in its.expr]
            shown = [shows(prometheus, its, begun_s) for its in queries]
            up = prometheus.query("sum (quire:replicas_up:by_host)")
        check("the board shows the replicas", len(shown) > REPLICAS and all(shown))
        check("Prometheus counts three", [its["value"][1] for its in up] == [str(REPLICAS)], up)


def load(client: httpx2.Client, ends_at: float) -> None:
    """Send prompts that begin alike, more at once than replicas take."""

    def chat(number: int) -> None:
        text = f"{number % 6} {'What is a block of the cache, and who may share it? ' * 12}"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 48}
        client.post("/v1/chat/completions", json=body)

    with ThreadPoolExecutor(CLIENTS) as pool:
        while time.monotonic() < ends_at:
            list(pool.map(chat, range(2 * CLIENTS)))


def main() -> int:
    """Enter namespaces of our own first, so that nothing reaches this machine's network."""
    if not os.environ.get(INSIDE):
        spaces = ["--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
        shell = ["sh", "-c", '"$@"; exit $?', "sh"]
        program = [*shell, sys.executable, "-m", "tests.docker.cluster"]
        return subprocess.run(
            ["unshare", *spaces, *program], cwd=ROOT, env=os.environ | {INSIDE: "1"}, check=False
        ).returncode
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quire-compose-") as name:
        run(Path(name))
    print(f"1 passed, 0 failed  # the services of {COMPOSE.name}, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
