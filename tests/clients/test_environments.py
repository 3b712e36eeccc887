"""What the clients' environments are made from."""

import json
import re

import pytest

from tests.clients.environments import Client, all_clients, environment, tools

CLIENTS = {client.name: client for client in all_clients()}
EVERY = pytest.mark.parametrize("client", [tools(), *CLIENTS.values()], ids=lambda c: c.name)


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


def test_no_key_of_a_persons_own_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a secret")
    found = environment(QUIRE_RANDOM="http://127.0.0.1:1")
    assert "OPENAI_API_KEY" not in found
    assert found["QUIRE_RANDOM"] == "http://127.0.0.1:1"
    assert found["PATH"].startswith(str(tools().built))
