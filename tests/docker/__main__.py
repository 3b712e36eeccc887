"""Proves docker/ without Docker: ``python -m tests.docker``. ``make -C tests/docker tools`` before.

Files first: promtool, Docker Compose, hadolint and Grafana's own model read them. Then a quire
under load and a Prometheus that scrapes it: every expression of every panel, rule and alert is
evaluated, and every query of a panel has to show something.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.docker.boards import BOARDS, DOCKER, ROOT
from tests.docker.live import check_live, check_several
from tests.docker.prometheus import PROMTOOL, TOOLS

HERE = Path(__file__).parent
BIN = TOOLS / "venv" / "bin"
PROMETHEUS = DOCKER / "prometheus"
TIMEOUT_S = 60
SECRETS = {
    "QUIRE_API_KEYS": "a key of the gate",
    "QUIRE_SCRAPE_KEY": "another key of it",
    "GRAFANA_PASSWORD": "and a word",
}


def check_files() -> tuple[int, int]:
    """Return how many checks passed, and how many failed."""
    outcomes = [*_prometheus(), *_compose(), *_dockerfile(), *_boards()]
    for name, good in outcomes:
        print(f"{'ok  ' if good else 'FAIL'} {name}")
    passed = sum(good for _, good in outcomes)
    return passed, len(outcomes) - passed


def _prometheus() -> Iterator[tuple[str, bool]]:
    rules = sorted(str(path) for path in (PROMETHEUS / "rules").glob("*.yml"))
    tests = sorted(str(path) for path in (PROMETHEUS / "tests").glob("*.yml"))
    yield "promtool check rules", _says_yes(PROMTOOL, "check", "rules", *rules)
    yield "promtool test rules", _says_yes(PROMTOOL, "test", "rules", *tests)
    with _copy() as folder:
        # The key's file is there in a container only.
        file = folder / "prometheus.yml"
        (folder / "key").write_text("key")
        file.write_text(file.read_text().replace("/run/secrets/scrape_key", str(folder / "key")))
        yield "promtool check config", _says_yes(PROMTOOL, "check", "config", str(file))


def _compose() -> Iterator[tuple[str, bool]]:
    """Let Docker Compose itself read the files; it needs no engine for that."""
    compose = [str(BIN / "docker-compose"), "--file", str(DOCKER / "compose.yaml")]
    bare = {name: value for name, value in os.environ.items() if name not in SECRETS}
    full = bare | SECRETS
    yield "compose config, boards alone", _says_yes(*compose, "config", "--quiet", env=full)
    everything = [*compose, "--profile", "container", "config", "--quiet"]
    yield "compose config, all in containers", _says_yes(*everything, env=full)
    both = [*compose, "--file", str(DOCKER / "compose.cluster.yaml")]
    yield "compose config, a cluster", _says_yes(*both, "config", "--quiet", env=full)
    for name in SECRETS:
        without = full | {name: ""}
        found = not _says_yes(*compose, "config", "--quiet", env=without, quiet=True)
        yield f"compose config refuses to be without {name}", found


def _dockerfile() -> Iterator[tuple[str, bool]]:
    yield "hadolint", _says_yes(BIN / "hadolint", str(DOCKER / "Dockerfile"))


def _boards() -> Iterator[tuple[str, bool]]:
    """Let Grafana's own model read every field."""
    reader = [str(BIN / "python"), str(HERE / "schema.py")]
    for path in sorted(BOARDS.glob("*.json")):
        yield f"Grafana's model of {path.name}", _says_yes(*reader, str(path))


@contextmanager
def _copy() -> Iterator[Path]:
    """Copy docker/prometheus to a folder where it may be changed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "prometheus"
        shutil.copytree(PROMETHEUS, folder)
        yield folder


def _says_yes(*command: str | Path, env: dict[str, str] | None = None, quiet: bool = False) -> bool:
    """Return whether a tool ends with 0; its output is shown otherwise."""
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=env, timeout=TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode and not quiet:
        print(done.stdout)
    return done.returncode == 0


def main() -> int:
    begun = time.monotonic()
    passed = failed = 0
    for check in (check_files, check_live, check_several):
        good, bad = check()
        passed += good
        failed += bad
    print(f"docker/ without Docker, in {time.monotonic() - begun:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
