"""What the clients' environments are made from."""

import json
import re
from pathlib import Path

import pytest

from tests.clients.__main__ import summary_of
from tests.clients.environments import Client, all_clients, environment, tools, without_addresses

CLIENTS = {client.name: client for client in all_clients()}
EVERY = pytest.mark.parametrize("client", [tools(), *CLIENTS.values()], ids=lambda c: c.name)


def test_every_client_that_the_readme_promises_is_there() -> None:
    assert CLIENTS.keys() == {
        "ai_sdk",
        "anthropic_npm",
        "instructor",
        "langchain",
        "ollama_npm",
        "ollama_python",
        "openai_npm",
        "pydantic_ai",
    }
    for client in CLIENTS.values():
        assert (client.folder / ("check.py" if client.is_python else "check.mjs")).is_file()


@EVERY
def test_a_lock_carries_versions_and_hashes_and_no_address(client: Client) -> None:
    text = client.lock.read_text()
    assert "://" not in text
    if client.is_python:
        assert not re.search(r"^-{1,2}(i|index|extra|find)", text, re.MULTILINE)
        packages = re.findall(r"^[a-z][\w.-]*==[^\n]*\\\n +--hash=sha256:", text, re.MULTILINE)
        assert len(packages) == len(re.findall(r"^\S", text, re.MULTILINE)) > 0
        return
    locked = json.loads(text)["packages"]
    own = locked.pop("")
    assert own["dependencies"]
    for package in locked.values():
        assert package["version"]
        assert package["integrity"].startswith("sha512-")
        assert "resolved" not in package


@EVERY
def test_what_a_client_is_tested_with_is_pinned_exactly(client: Client) -> None:
    if client.is_python:
        first = (client.folder / "requirements.in").read_text().splitlines()[0]
        assert "==" in first
        assert re.sub(r"\[.*\]", "", first) + " \\" in client.lock.read_text().splitlines()
        return
    asked = json.loads((client.folder / "package.json").read_text())["dependencies"]
    assert asked == json.loads(client.lock.read_text())["packages"][""]["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in asked.values())


def test_what_npm_adds_to_a_lock_is_taken_out() -> None:
    package = {"version": "1.0.0", "funding": {"url": "somewhere"}}
    assert without_addresses({"packages": {"a": package}}) == {
        "packages": {"a": {"version": "1.0.0"}}
    }


def test_no_key_of_a_persons_own_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a secret")
    found = environment(QUIRE_RANDOM="http://127.0.0.1:1")
    assert "OPENAI_API_KEY" not in found
    assert found["QUIRE_RANDOM"] == "http://127.0.0.1:1"
    assert found["PATH"].startswith(str(tools().built))


def test_checks_are_counted_as_their_runner_counts_them(tmp_path: Path) -> None:
    assert summary_of(CLIENTS["langchain"], "..\n== 2 passed in 1.00s ==\n") == "2 passed in 1.00s"
    tap = "ok 1 - a\n# error: {\n# tests 2\n# pass 1\n# fail 1\n"
    assert summary_of(CLIENTS["ai_sdk"], tap) == "1 passed, 1 failed"
    assert summary_of(Client(tmp_path), "") == "0 passed, 0 failed"
