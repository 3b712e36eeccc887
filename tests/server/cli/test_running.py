"""`quire ps` and `quire stop`, against a server that answers as a front does."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.server.commands import ENGINE, Run, StandIn, one_sentence

KEY = "a-key-of-sixteen-characters"


class Server(StandIn):
    def __init__(self) -> None:
        super().__init__()
        self.models: dict[str, float | None] = {"one": 600.0, "two": None, "three": -1.0}
        """How many seconds each stays; None for ever."""
        self.keeps: set[str] = set()
        self.more: dict[str, Any] = {"size_max": 5 << 30}
        self.raw: bytes | None = None
        self.keys: list[str | None] = []

    def answer(self, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        self.keys.append(key)
        if self.raw is not None:
            return 200, self.raw
        if body is None:
            return 200, {"models": self.listed()}
        if body["model"] not in self.models:
            return 404, {"error": "model 'nobody' not found"}
        if body["model"] not in self.keeps:
            del self.models[body["model"]]
        return 200, {"done_reason": "unload"}

    def listed(self) -> list[dict[str, Any]]:
        until = {
            name: "2300-01-01T00:00:00Z"
            if seconds is None
            else (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
            for name, seconds in self.models.items()
        }
        size = {"size": 3 << 30, "context_length": 4096} | self.more
        return [{"name": name, "expires_at": time} | size for name, time in until.items()]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


def port_of(server: Server) -> tuple[str, str]:
    return "--port", str(server.port)


def test_models_that_are_loaded_are_told_with_how_long_they_stay(
    quire: Run, server: Server
) -> None:
    result = quire("ps", *port_of(server))
    assert result.exit_code == 0
    head, *lines = [line.split() for line in result.stdout.splitlines()]
    assert head == ["MODEL", "MEMORY", "AT", "MOST", "CONTEXT", "STAYS"]
    assert lines[0] == ["one", "3.00", "GiB", "5.00", "GiB", "4096", "10", "min"]
    assert lines[1][-2:] == ["for", "ever"]
    assert lines[2][-4:] == ["until", "its", "answers", "end"]
    server.more = {}
    lines = [line.split() for line in quire("ps", *port_of(server)).stdout.splitlines()]
    assert lines[1] == ["one", "3.00", "GiB", "-", "4096", "10", "min"], "Ollama gives no limit"
    server.models.clear()
    assert quire("ps", *port_of(server)).stdout == "no model is loaded\n"


def test_a_model_is_unloaded(quire: Run, server: Server) -> None:
    result = quire("stop", "one", *port_of(server))
    assert (result.exit_code, result.stdout) == (0, "one is unloaded\n")
    assert "one" not in server.models


def test_a_model_that_stays_is_told(quire: Run, server: Server) -> None:
    server.keeps.add("one")
    assert "one stays loaded" in one_sentence(quire("stop", "one", *port_of(server)), ENGINE)


def test_a_key_of_the_settings_is_sent(
    quire: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ACCESS__API_KEYS", KEY)
    quire("ps", "--host", "0.0.0.0", *port_of(server))
    assert server.keys == [f"Bearer {KEY}"]


def test_proxies_of_the_environment_are_not_asked(
    quire: Run, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert quire("ps", *port_of(server)).exit_code == 0


def test_errors_are_sentences(quire: Run, server: Server) -> None:
    said = one_sentence(quire("stop", "nobody", *port_of(server)), ENGINE)
    assert said.endswith("model 'nobody' not found")
    for raw in (b"hello", b"[]"):
        server.raw = raw
        said = one_sentence(quire("ps", *port_of(server)), ENGINE)
        assert said.endswith("another program answers (200)")


def test_where_nobody_answers_the_sentence_says_what_to_do(quire: Run) -> None:
    with Server() as server:
        port = port_of(server)
    said = one_sentence(quire("ps", *port), ENGINE)
    assert "start one with `quire serve`" in said
    said = one_sentence(quire("ps", "--host", "::1", *port), ENGINE)
    assert "no server answers at http://[::1]:" in said
