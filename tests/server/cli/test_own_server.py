"""A server for one command: it is there as long as the command, and tells why it is not."""

import subprocess
import sys
from pathlib import Path

import httpx2
import psutil
import pytest

from server.cli import own_server as module
from server.cli.own_server import OwnServerError, own_server
from server.cli.running import client_of
from server.config import Config
from tests.clients.servers import QUIRE, run_to_end

BEGIN = """
import json, socket, sys, time
listener, control = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
message = json.loads(control.makefile().readline())
assert message["model"] == "/some/where" and message["settings"]["log"]["level"] == "warning"
tell = lambda **values: control.sendall(json.dumps(values).encode() + b"\\n")
tell(started=True)
"""
SERVE = """
listener.listen()
tell(ready=True)
connection, _ = listener.accept()
connection.recv(1000)
connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
"""


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> list[subprocess.Popen[bytes]]:
    """Have a program of a few lines in the place of a model's process; return what is started."""
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", BEGIN + program))
    monkeypatch.setattr(subprocess, "Popen", Popen)
    return started


@pytest.mark.parametrize("code", [1, 2, 3, 4, 70])
def test_a_process_that_ends_before_it_reads_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", f"raise SystemExit({code})"))
    with (
        pytest.raises(OwnServerError, match="ended before it was ready") as caught,
        own_server(Config(), Path("/some/where"), "some"),
    ):
        raise AssertionError
    assert caught.value.exit_code == code


@pytest.mark.parametrize("after", ["control.recv(1)", "time.sleep(600)"])
def test_the_process_ends_with_the_block_even_if_it_hangs(
    monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    started = stand_in(monkeypatch, SERVE + after)
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 5.0 if "recv" in after else 0.1)
    with own_server(Config(), Path("/some/where"), "some") as url:
        assert url.startswith("http://127.0.0.1:")
        with client_of(Config(), url) as client:
            assert client.get("/").json() == {}
        assert started[0].poll() is None
    with pytest.raises(httpx2.ConnectError), client_of(Config(), url) as client:
        client.get("/")
    assert started[0].returncode == (0 if "recv" in after else -9)


@pytest.mark.parametrize(
    ("program", "reason", "code"),
    [
        ("tell(failed='no luck'); sys.exit(3)", "no luck", 3),
        ("tell(failed='no memory'); sys.exit(2)", "no memory", 2),
        ("sys.exit(1)", "the model's process ended before it was ready", 1),
        ("", "the model's process ended before it was ready", 1),
        ("tell(loaded=1, of=2)", "the model's process ended before it was ready", 1),
    ],
)
def test_a_process_that_does_not_serve_tells_why(
    monkeypatch: pytest.MonkeyPatch, program: str, reason: str, code: int
) -> None:
    stand_in(monkeypatch, program)
    serving = own_server(Config(), Path("/some/where"), "some")
    with pytest.raises(OwnServerError, match=reason) as raised, serving:
        pytest.fail("it does not serve")
    assert raised.value.exit_code == code


def test_the_demo_answers_a_question_and_nothing_stays() -> None:
    command = (QUIRE, "run", "demo", "What is a sparse buffer?")
    done = run_to_end(*command, stdin=subprocess.DEVNULL)
    assert (done.returncode, "range" in done.stdout) == (0, True), done.stderr
    children = psutil.Process().children(recursive=True)
    assert not any("model_process" in " ".join(child.cmdline()) for child in children)
