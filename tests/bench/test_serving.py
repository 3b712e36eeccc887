from itertools import count
from pathlib import Path

import pytest

from tests.bench import serving
from tests.bench.contest import Contest
from tests.bench.rounds import Rounds
from tests.bench.serving import STREAMS, run_serving
from tests.bench.small_server import small_server


def test_servers_at_urls_are_compared_at_every_number_of_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_TOKENS", 4)
    with small_server() as own, small_server() as other:
        contest = Contest(1, count(), own.url, (("other", other.url),), with_mlx_lm=False)
        part = run_serving(Rounds(2, 60), 1, tmp_path, contest)
    assert [row.name.partition(", ")[0] for row in part.rows] == (
        ["serving"] * len(STREAMS) + ["time to first token"] * len(STREAMS)
    ), "without a quire of our own there is no dense one"
    assert {row.peer_name for row in part.rows} == {"other"}
    assert all(row.quire > 0 and row.peer > 0 for row in part.rows)
    assert len(own.bodies) == len(other.bodies)
    assert not {*own.prompts} & {*other.prompts}
    assert part.facts[0][1].startswith("2 rounds of 1 requests per stream")
