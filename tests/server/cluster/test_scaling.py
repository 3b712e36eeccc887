"""How many replicas are needed."""

import pytest

from engine.types import EngineStats
from server.cluster.scaling import Need, need_of, needs, wanted_replicas
from tests.engines import recall_client

IDLE = Need(0.0, 0.0, 0.0)
HALF = Need(0.0, 0.5, 0.2)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ([IDLE], 1),
        ([Need(1.0, 1.0, 0.3)], 2),
        ([Need(0.0, 0.95, 0.1)], 2),
        ([Need(0.0, 0.1, 0.95)], 2),
        ([HALF, HALF], 2),
        ([IDLE, HALF], 1),
        ([IDLE, IDLE, IDLE], 2),
        # One that waits on one of three is passing; but nobody goes meanwhile.
        ([Need(1.0, 0.2, 0.2), IDLE, IDLE], 3),
        # What only the engine's own question has waited.
        ([Need(0.05, 0.0, 0.0), IDLE], 1),
    ],
)
def test_replicas_are_added_where_requests_wait_and_taken_away_where_others_have_room(
    said: list[Need], wanted: int
) -> None:
    assert wanted_replicas(said, len(said)) == wanted


def test_as_long_as_one_has_said_nothing_their_number_stays() -> None:
    assert wanted_replicas([Need(9.0, 1.0, 1.0)], 2) == 2
    assert wanted_replicas([], 1) == 1


def test_a_need_comes_out_as_it_went_in() -> None:
    figures = {name: {"a": value} for name, value in HALF.figures().items()}
    assert needs(figures) == [HALF]
    figures["waiting"]["b"] = 1.0
    assert needs(figures) == [HALF], "one that has not said all is not counted"
    assert needs({}) == []


def test_an_engine_says_what_it_needs() -> None:
    assert need_of(EngineStats(waiting=2, running=3), 4) == Need(2.0, 0.75, 0.0)
    client = recall_client()
    assert client.stop(10.0)
    found = need_of(client.stats, client.limits.max_num_seqs)
    assert found.waiting == 0
    assert 0 <= found.blocks_share <= 1
