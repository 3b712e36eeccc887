"""``quire run``: a chat in the terminal, with a server that answers as quire does."""

import io
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from server.cli import run as module
from server.cli.run import DIM, HELP, PLAIN, run_model
from server.cli.running import NotRunningError
from tests.server.commands import ENGINE, MODEL, Run, StandIn, StandInHandler, one_sentence

MODEL_NAME = "mlx-community/Qwen3-4B-4bit"
THOUGHT = {"reasoning_content": "hm"}
ANSWER = [THOUGHT, {"content": "Hel"}, {"content": "lo"}, {}]


class Server(StandIn):
    def __init__(self) -> None:
        super().__init__()
        self.models: Any = {"data": [{"id": MODEL_NAME, "owned_by": "quire"}]}
        self.answers: list[Any] = []
        self.status = 200
        self.asked: list[Any] = []
        """The messages of each request."""

    def answer(self, path: str, body: Any, key: str | None) -> tuple[int, Any]:
        if body is None:
            return 200, self.models
        assert body["model"] == MODEL_NAME
        self.asked.append(body["messages"])
        if self.status != 200:
            return self.status, {"error": {"message": "No."}}
        events = self.answers.pop(0) if self.answers else ANSWER
        lines = [{"choices": [{"delta": e}]} if "error" not in e else e for e in events]
        text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines)
        return 200, f": a comment\n\n{text}data: [DONE]\n\n".encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as started:
        monkeypatch.setenv("QUIRE_SERVER__PORT", str(started.port))
        yield started


@pytest.fixture(autouse=True)
def no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_terminal(monkeypatch: pytest.MonkeyPatch, *lines: str | BaseException) -> str:
    """Chat as a person types lines, and Ctrl-D at last; return what is shown."""
    typed = iter([*lines, EOFError()])

    def read(_: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    shown = Terminal()
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", shown)
    run_model("qwen3:4b", None, None)
    return shown.getvalue()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


HELLO = {"role": "assistant", "content": "Hello"}


def test_a_question_gets_its_answer_without_thoughts(server: Server, quire: Run) -> None:
    result = quire("run", "qwen3:4b", "Who is there?")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello\n", "")
    assert server.asked == [[user("Who is there?")]]


@pytest.mark.parametrize(
    ("question", "piped", "asked"),
    [
        (None, "from a pipe", ["from a pipe"]),
        ("Sum this up:", "a text", ["Sum this up:\n\na text"]),
        ("alone", "", ["alone"]),
        (None, "", []),
    ],
)
def test_a_pipe_is_a_question_or_the_rest_of_it(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    question: str | None,
    piped: str,
    asked: list[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    run_model("qwen3:4b", question, None)
    assert server.asked == [[user(text)] for text in asked]


def test_a_chat_goes_on_and_shows_thoughts_dimmed(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = at_terminal(monkeypatch, "one", "two")
    assert shown.startswith(f"{DIM}hm{PLAIN}\n\nHello\n{DIM}hm")
    assert server.asked == [[user("one")], [user("one"), HELLO, user("two")]]
    assert HELP in capsys.readouterr().err


def test_commands_of_a_chat(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_terminal(
        monkeypatch, "one", "", "/clear", "/system Be brief.", "two", "/system", "three", "/nothing"
    )
    system = {"role": "system", "content": "Be brief."}
    assert server.asked == [
        [user("one")],
        [system, user("two")],
        [user("two"), HELLO, user("three")],
    ]
    assert capsys.readouterr().err.count(HELP) == 2


@pytest.mark.parametrize(
    ("lines", "question"),
    [
        (['"""one', "two", 'three"""'], "one\ntwo\nthree"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one"""'], "one"),
        (['"""', "/clear", '"""'], "/clear"),
        (['say "hello"'], 'say "hello"'),
    ],
)
def test_several_lines_are_one_question(
    server: Server, monkeypatch: pytest.MonkeyPatch, lines: list[str], question: str
) -> None:
    at_terminal(monkeypatch, *lines)
    assert server.asked == [[user(question)]]


def test_ctrl_c_ends_a_line_and_an_answer_but_not_the_chat(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    echo, interrupted = typer.echo, list[str]()

    def interrupt(text: str = "", **how: Any) -> None:
        if text == "lo" and not interrupted:
            interrupted.append(text)
            raise KeyboardInterrupt
        echo(text, **how)

    monkeypatch.setattr(typer, "echo", interrupt)
    at_terminal(monkeypatch, KeyboardInterrupt(), "one", "two")
    kept = {"role": "assistant", "content": "Hel"}
    assert server.asked == [[user("one")], [user("one"), kept, user("two")]]


@pytest.mark.parametrize("how", ["status", "event"])
def test_a_refused_question_is_told_and_forgotten(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quire: Run,
    how: str,
) -> None:
    server.answers = [[{"content": "Hel"}, {"error": {"message": "No."}}]] * 2
    server.status = 400 if how == "status" else 200
    result = quire("run", "qwen3:4b", "one")
    assert (result.exit_code, result.stderr) == (ENGINE, "quire: No.\n")
    at_terminal(monkeypatch, "one", "two")
    assert "quire: No.\n" in capsys.readouterr().err
    assert server.asked[-1] == [user("two")]


def test_a_server_that_goes_away_is_told(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInHandler, "do_POST", lambda handler: handler.connection.close())
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(NotRunningError, match="the server has ended the answer"):
        run_model("qwen3:4b", "one", None)


def test_a_terminal_is_not_given_its_control_characters(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers = [[{"content": "a\x1b[2Jb\n\tc\x07"}]]
    assert at_terminal(monkeypatch, "one").startswith("a[2Jb\n\tc\n")


# --- which server ---------------------------------------------------------------------------------


def own_servers(
    server: Server, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...] = ()
) -> list[tuple[Path, str]]:
    """The folders and names of models that get a server of their own, from now on."""
    started: list[tuple[Path, str]] = []

    @contextmanager
    def own(_: object, folder: Path, name: str) -> Iterator[str]:
        started.append((folder, name))
        yield server.url

    found = SimpleNamespace(folder=Path("/some/where"), name=MODEL_NAME, missing=missing)
    monkeypatch.setattr(module, "own_server", own)
    monkeypatch.setattr(module, "find_model", lambda *_, **_how: found)
    return started


@pytest.mark.parametrize(
    "models",
    [
        {"data": []},
        {"data": [{"id": "another", "owned_by": "quire"}]},
        {"data": [{"id": MODEL_NAME, "owned_by": "another"}]},
        {"data": [{"id": MODEL_NAME}]},
        {"no": "models"},
    ],
)
def test_a_model_that_no_quire_serves_gets_a_server_of_its_own(
    server: Server, quire: Run, monkeypatch: pytest.MonkeyPatch, models: Any
) -> None:
    server.models = models
    started = own_servers(server, monkeypatch)
    monkeypatch.setattr(module, "check_found", lambda *_: None)
    assert quire("run", "qwen3:4b", "one").stdout == "Hello\n"
    assert started == [(Path("/some/where"), MODEL_NAME)]


def test_a_model_that_is_not_here_is_pulled_first(
    server: Server, quire: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.models, pulled = {"data": []}, []
    started = own_servers(server, monkeypatch, missing=("weights",))
    monkeypatch.setattr(module, "pull_model", lambda name, *_, **options: pulled.append(options))
    assert quire("run", "qwen3:4b", "one").stdout == "Hello\n"
    assert (len(started), pulled) == (1, [{"dry_run": False, "force": False}])


def test_a_name_that_is_none_is_refused(quire: Run) -> None:
    line = one_sentence(quire("run", "no-such-model", "one"), MODEL)
    assert line.startswith("quire: no-such-model: there is no such folder")
