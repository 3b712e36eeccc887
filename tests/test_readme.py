"""Every command of README.md, as far as it goes without a network."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.shipped import shipped
from tests.clients.servers import QUIRE, serving
from tests.macs import table, table_of_drafts

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# A command, its comment cut off, with the lines of a quoted body.
COMMANDS = [
    found.group().strip()
    for found in re.finditer(r"^    (?:make|curl|quire)(?:[^'#\n]|'[^']*')*", README, re.MULTILINE)
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The demo model, served as `make serve` does."""
    limits = ("--kv-budget", "64MiB", "--max-num-seqs", "2")
    with serving(QUIRE, "serve", "demo", "--port", "0", *limits) as process:
        yield process.url


def run(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a home without models and without a network."""
    words = [QUIRE if word == "quire" else word for word in shlex.split(command)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "HOME": str(home)}
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_tables_of_macs_are_those_of_their_command() -> None:
    assert table() in README
    assert table_of_drafts() in README


def test_the_commands_are_found() -> None:
    verbs = ["serve", "-N", "serve", "serve", "run", "pull", "plan", "bench", "launch", "service"]
    assert [command.split()[1] for command in COMMANDS] == verbs


def test_make_knows_its_target(tmp_path: Path) -> None:
    done = run(f"{COMMANDS[0]} --dry-run", tmp_path)
    assert (done.returncode, "quire serve demo --port 8000" in done.stdout) == (0, True)


def test_what_a_mac_lacks_is_installed_before_anything_is_built(tmp_path: Path) -> None:
    before, _, _ = README.partition("    make serve ")
    lines = ["no release yet", "xcode-select --install", "uv python install 3.13", "export PYTHON="]
    places = [before.find(line) for line in lines]
    assert -1 < places[0] < places[1] < places[2] < places[3]
    environment = os.environ | {"PYTHON": "/opt/of/uv/python3.13"}
    command = ["make", "--dry-run", "--always-make", "serve"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "/opt/of/uv/python3.13 -m venv" in done.stdout, "what it sets up is of that Python"


def test_curl_gets_a_stream(address: str, tmp_path: Path) -> None:
    done = run(COMMANDS[1].replace("http://127.0.0.1:8000", address), tmp_path)
    assert done.stdout.endswith("data: [DONE]\n\n"), done.stderr


def test_serve_alone_says_what_to_do_on_an_empty_disk(tmp_path: Path) -> None:
    done = run(COMMANDS[2], tmp_path)
    assert (done.returncode, "`quire pull ORG/NAME`" in done.stderr) == (3, True)


def test_run_alone_says_what_fits(tmp_path: Path) -> None:
    assert "fit" in run(COMMANDS[4], tmp_path).stdout


@pytest.mark.parametrize("command", [COMMANDS[3], *COMMANDS[5:8]])
def test_models_of_the_hub_are_named_rightly(command: str, tmp_path: Path) -> None:
    done = run(command, tmp_path)
    assert (done.returncode, "HF_HUB_OFFLINE is set" in done.stderr) == (3, True), done.stderr


def test_a_plan_of_a_model_that_is_here_is_printed(tmp_path: Path) -> None:
    here = COMMANDS[6].replace("Qwen/Qwen3-4B", str(shipped("demo/model")))
    assert run(here, tmp_path).stdout.startswith("fits ")


def test_launch_finds_the_server(address: str, tmp_path: Path) -> None:
    done = run(f"{COMMANDS[8]} --print --url {address}", tmp_path)
    assert f"ANTHROPIC_BASE_URL={address}" in done.stdout, done.stderr


def test_a_service_can_be_installed(tmp_path: Path) -> None:
    before, _, model = COMMANDS[9].partition(" -- ")
    assert (run(f"{before} --help", tmp_path).returncode, model) == (0, "qwen3:4b")
