from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.bench import servers
from tests.bench.compare import Case, Measured
from tests.bench.contest import Contest
from tests.bench.models import ModelStore, weight_bytes
from tests.bench.peers import Contestant, Remote
from tests.bench.programs import Program
from tests.bench.rounds import Rounds
from tests.bench.servers import _shares_text, _streaming_row, run_servers
from tests.bench.small_server import small_server
from tests.models import ModelSpec


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setattr(servers, "MEMORY_BYTES", 2**21)
    return ModelStore(tmp_path, ModelSpec(vocab_size=512))


@pytest.mark.parametrize("quantised", [False, True])
def test_every_peer_has_its_targets(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, quantised: bool
) -> None:
    started: list[Program | None] = []

    @contextmanager
    def two(self: Contest, ours: Program, mlx_lm: Program | None) -> Iterator[list[Contestant]]:
        started.extend((ours, mlx_lm))
        with small_server() as own, small_server() as llama, small_server() as mlx:
            sides = [("quire", own), ("llama-server", llama), ("mlx_lm.server", mlx)]
            yield [Remote.at(label, server.url) for label, server in sides]

    monkeypatch.setattr(Contest, "servers", two)
    part = run_servers(Rounds(1, 60), 1, Contest(1, count()), store, quantised=quantised)
    *judged, streaming = part.rows
    assert streaming.peer_name == "read probe"
    goals = [(row.peer_name, row.goal.text) for row in judged if row.goal is not None]
    ours, mlx_lm = started
    assert ours is not None
    if quantised:
        assert goals == [("llama-server", "ratio >= 1")] * 3
        assert mlx_lm is None
        assert any(argument.endswith("4-bit") for argument in ours.arguments)
    else:
        rates = [("llama-server", "ratio >= 1.05"), ("mlx_lm.server", "ratio >= 5")]
        rates += 2 * [("llama-server", "ratio >= 1.2"), ("mlx_lm.server", "ratio >= 5")]
        assert goals == [*rates, *3 * [("llama-server", "ratio >= 1")]]
        assert mlx_lm is not None
        assert mlx_lm.proves_products
        assert any(argument.endswith("float32") for argument in mlx_lm.arguments)
    assert "mlx_lm.server" in dict(part.facts)["of the read limit"]


def test_a_quire_at_a_url_has_weights_of_its_own_and_no_row_about_them(store: ModelStore) -> None:
    with small_server() as own, small_server() as other:
        contest = Contest(1, count(), own.url, (("other", other.url),), with_mlx_lm=False)
        part = run_servers(Rounds(1, 60), 1, contest, store)
    assert not [row for row in part.rows if row.peer_name == "read probe"]
    assert len(part.rows) == 6


def test_a_token_reads_all_weights_once(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(3_000_000))
    (tmp_path / "b.safetensors").write_bytes(bytes(1_000_000))
    assert weight_bytes(tmp_path) == 4_000_000
    row = _streaming_row([1000.0, 2000.0, 3000.0], [10.0, 10.0, 10.0], tmp_path)
    assert (row.quire, row.peer, row.ratio.value) == (8.0, 10.0, 0.8)
    assert row.goal is not None
    assert (row.goal.text, row.goal.met) == ("ratio >= 0.85", False)
    case = Case(1, 252, 64, 1)
    seen = {
        (label, case): Measured([1.0], [1.0], [rate]) for label, rate in (("a", 1e3), ("b", 2e3))
    }
    said = _shares_text(seen, ["a", "b"], case, [10.0], tmp_path)
    assert said.endswith("a 40 % (1000.0 tok/s), b 80 % (2000.0 tok/s)")
