"""What tools say of docker/'s files, and whether they would say it of a fault."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from tests.docker.boards import BOARDS, DOCKER, ROOT
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
NEVER = "vector(0) > 1"


def check_files() -> tuple[int, int]:
    """How many checks passed, and how many failed."""
    outcomes = [*_prometheus(), *_planted_alerts(), *_compose(), *_dockerfile(), *_boards()]
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


def _planted_alerts() -> Iterator[tuple[str, bool]]:
    """Alerts that never fire, or fire at once, have to fail their unit tests, each its own."""
    text = (PROMETHEUS / "rules" / "alerts.yml").read_text()
    for change in ({"expr": NEVER}, {"for": "0s"}):
        settings = yaml.safe_load(text)
        planted = [rule for group in settings["groups"] for rule in group["rules"]]
        for rule in planted:
            rule.update(change)
        with _copy() as folder:
            (folder / "rules" / "alerts.yml").write_text(yaml.safe_dump(settings))
            tests = [str(PROMTOOL), "test", "rules", str(folder / "tests" / "alerts.yml")]
            done = subprocess.run(tests, capture_output=True, text=True, timeout=TIMEOUT_S)
        failed = set(re.findall(r'alertname=\\*"(\w+)', done.stdout + done.stderr))
        for rule in planted:
            yield f"planted and found: {rule['alert']} with {change}", rule["alert"] in failed


def _compose() -> Iterator[tuple[str, bool]]:
    """Docker Compose itself reads the file; it needs no engine for that."""
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
        yield f"planted and found: compose without {name}", found


def _dockerfile() -> Iterator[tuple[str, bool]]:
    yield "hadolint", _says_yes(BIN / "hadolint", str(DOCKER / "Dockerfile"))
    with tempfile.TemporaryDirectory() as folder:
        planted = Path(folder) / "Dockerfile"
        planted.write_text((DOCKER / "Dockerfile").read_text() + "RUN cd /tmp && sudo true\n")
        found = not _says_yes(BIN / "hadolint", str(planted), quiet=True)
        yield "planted and found: sudo in the Dockerfile", found


def _boards() -> Iterator[tuple[str, bool]]:
    """Grafana's own model knows every field."""
    reader = [str(BIN / "python"), str(HERE / "schema.py")]
    for path in sorted(BOARDS.glob("*.json")):
        yield f"Grafana's model of {path.name}", _says_yes(*reader, str(path))
        with tempfile.TemporaryDirectory() as folder:
            planted = Path(folder) / path.name
            planted.write_text(path.read_text().replace('"fillOpacity"', '"fillOpacty"', 1))
            found = not _says_yes(*reader, str(planted), quiet=True)
            yield f"planted and found: a field misspelt in {path.name}", found


@contextmanager
def _copy() -> Iterator[Path]:
    """docker/prometheus in a place where it may be changed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "prometheus"
        shutil.copytree(PROMETHEUS, folder)
        yield folder


def _says_yes(*command: str | Path, env: dict[str, str] | None = None, quiet: bool = False) -> bool:
    """Whether a tool ends with 0; what it says otherwise is shown."""
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=env, timeout=TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode and not quiet:
        print(done.stdout)
    return done.returncode == 0
