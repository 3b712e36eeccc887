"""Runs every client against a server: ``make clients``.

Three servers answer: ``quire serve`` with random weights, which says something sensible only where
a grammar holds it, the same with weights that make vectors, and a model that says what it is told
(tests/clients/parrot.py).
"""

import argparse
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.clients.environments import Client, all_clients, environment, install_tools
from tests.clients.servers import embedding_server, parrot_server, random_server

CHECK_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Result:
    """How a client fared."""

    name: str
    passed: bool
    summary: str
    install_s: float
    run_s: float


def check(client: Client, addresses: dict[str, str]) -> Result:
    """Installs a client and runs its checks; what they say is shown where one fails. addresses: of
    the servers, by the variables that tell them."""
    started = time.monotonic()
    client.install()
    installed = time.monotonic()
    passed, output = _run(client, environment(**addresses))
    ended = time.monotonic()
    if not passed:
        print(output, flush=True)
    summary = summary_of(client, output)
    return Result(client.name, passed, summary, installed - started, ended - installed)


def _run(client: Client, variables: dict[str, str]) -> tuple[bool, str]:
    """Whether all checks passed, and what they said."""
    try:
        done = subprocess.run(
            client.command(),
            cwd=client.workplace(),
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        return False, f"{said}\nnot done after {CHECK_TIMEOUT_S} s"
    return done.returncode == 0, done.stdout.decode(errors="replace")


def summary_of(client: Client, output: str) -> str:
    """How many checks there were, in the words of pytest or of Node's runner."""
    lines = output.strip().splitlines() or ["no output"]
    if client.is_python:
        return lines[-1].strip("= ")
    counts = dict(re.findall(r"^# (pass|fail) (\d+)$", output, re.MULTILINE))
    return f"{counts.get('pass', '0')} passed, {counts.get('fail', '0')} failed"


def main() -> int:
    """1 when a client failed."""
    known = {client.name: client for client in all_clients()}
    parser = argparse.ArgumentParser(description="Clients against quire.")
    parser.add_argument("clients", nargs="*", choices=[*known, []], help="only these")
    parser.add_argument("--several", action="store_true", help="behind a front, not directly")
    options = parser.parse_args()
    chosen, several = options.clients or list(known), options.several
    # However it is ended, the servers end with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    install_tools()
    tools_s = time.monotonic() - started
    with (
        random_server(several=several) as random,
        parrot_server(several=several) as parrot,
        embedding_server(several=several) as embedder,
    ):
        addresses = {"QUIRE_RANDOM": random, "QUIRE_PARROT": parrot, "QUIRE_EMBEDDER": embedder}
        results = [check(known[name], addresses) for name in chosen]
    print(f"{'client':16}{'install':>9}{'checks':>9}")
    print(f"{'(uv and Node)':16}{tools_s:7.1f} s")
    for result in results:
        line = f"{result.name:16}{result.install_s:7.1f} s{result.run_s:7.1f} s  {result.summary}"
        print(line if result.passed else f"{line}  <-- FAILED")
    failed = sum(not result.passed for result in results)
    print(f"{len(results) - failed} passed, {failed} failed, in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
