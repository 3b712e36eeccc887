"""The commands of ``quire cluster``."""

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from server.cli.commands import app
from server.ray import commands, run
from server.ray.machines import ReplicaCounts

COMMANDS = {
    "start": ["--port", "5"],
    "join": ["head:1", "--key-file", "key"],
    "serve": ["demo", "--replicas", "2", "--port", "7", "--set", "log.level=error"],
    "status": [],
    "stop": [],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_without_ray_each_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["cluster", name, *COMMANDS[name]])
    assert result.exit_code == 1
    assert "quire[cluster]" in result.stderr
    assert result.stderr.count("\n") == 1


def test_each_does_what_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def told(name: str) -> Callable[..., str]:
        def call(*arguments: object) -> str:
            calls.append((name, *arguments[:6]))
            return f"did {name}"

        return call

    monkeypatch.setattr(commands, "find_spec", lambda name: ModuleSpec(name, None))
    for name in (
        "start_cluster",
        "join_cluster",
        "serve_cluster",
        "cluster_status",
        "stop_cluster",
    ):
        monkeypatch.setattr(run, name, told(name))
    for name, arguments in COMMANDS.items():
        result = CliRunner().invoke(app, ["cluster", name, *arguments])
        assert result.exit_code == 0, result.output
        assert name == "serve" or f"did {calls[-1][0]}" in result.output
    assert calls == [
        ("start_cluster", None, 5),
        ("join_cluster", "head:1", Path("key"), mock.ANY),
        (
            "serve_cluster",
            "demo",
            ReplicaCounts(2, 2),
            1,
            None,
            {"server": {"host": None, "port": 7}},
            ["log.level=error"],
        ),
        ("cluster_status",),
        ("stop_cluster",),
    ]


def test_for_a_service_each_stays_in_the_foreground(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def serve_from_start(*given: Any) -> None:
        calls.append(given[:2])
        given[2]()

    monkeypatch.setattr(commands, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(run, "serve_from_start", serve_from_start)
    monkeypatch.setattr(run, "serve_cluster", lambda *given, waits: calls.append((given[1], waits)))
    monkeypatch.setattr(run, "stay_in_cluster", lambda *given: calls.append(given[:2]))
    asked = ["demo", "--start", "--address", "10.0.0.1", "--head-port", "5", "--replicas", "1-3"]
    assert CliRunner().invoke(app, ["cluster", "serve", *asked]).exit_code == 0
    assert CliRunner().invoke(app, ["cluster", "join", "head:1", "--stay"]).exit_code == 0
    assert calls == [("10.0.0.1", 5), (ReplicaCounts(1, 3), True), ("head:1", None)]


def test_replicas_that_are_no_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: ModuleSpec(name, None))
    result = CliRunner().invoke(app, ["cluster", "serve", "demo", "--replicas", "3-1"])
    assert result.exit_code == 2


def test_the_key_is_asked_without_an_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(run, "join_cluster", lambda head, file, ask_key: ask_key()[::-1])
    result = CliRunner().invoke(app, ["cluster", "join", "head:1"], input="secret\n")
    assert ("secret" in result.output, "terces" in result.output) == (False, True)
