from itertools import count
from pathlib import Path

import pytest

from tests.bench import contest as contest_module
from tests.bench.contest import Contest
from tests.bench.peers import BrokenError
from tests.bench.programs import Command, Program, mlx_lm_server, quire
from tests.bench.small_server import small_server

MODEL = Path("model")
OURS, MLX_LM = quire(MODEL, 1), mlx_lm_server(MODEL, 1)
DENSE = quire(MODEL, 1, "dense")
LLAMA = Command("llama-server", "llama-server --port {port}")


class Started:
    """A server that is only written down."""

    running: list[str] = []  # noqa: RUF012  of one test

    def __init__(self, program: Program | Command, threads: int) -> None:
        self.label = program.label

    def __enter__(self) -> "Started":
        self.running.append(self.label)
        return self

    def __exit__(self, *_: object) -> None:
        self.running.remove(self.label)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(contest_module, "Server", Started)
    monkeypatch.setattr(Started, "running", [])
    return Started.running


def test_ours_comes_first_and_all_that_was_started_ends(running: list[str]) -> None:
    with small_server() as other:
        contest = Contest(1, count(), peers=(("other", other.url),), commands=(LLAMA,))
        with contest.servers(OURS, MLX_LM, [DENSE]) as servers:
            labels = [server.label for server in servers]
            assert running == ["quire", "mlx_lm.server", "llama-server", "quire dense"]
    assert labels == ["quire", "mlx_lm.server", "llama-server", "other", "quire dense"]
    assert running == []


def test_a_quire_at_a_url_stands_for_ours(running: list[str]) -> None:
    with small_server(model="theirs") as own:
        contest = Contest(1, count(), own.url, with_mlx_lm=False)
        with contest.servers(OURS, MLX_LM, [DENSE]) as servers:
            assert running == []
    assert [(server.label, server.target.model) for server in servers] == [("quire", "theirs")]


def test_nobody_at_a_url_is_broken_and_what_was_started_ends(running: list[str]) -> None:
    with small_server() as gone:
        url = gone.url
    contest = Contest(1, count(), peers=(("gone", url),))
    with pytest.raises(BrokenError, match="gone: no list of models"), contest.servers(OURS, None):
        pass
    assert running == []
