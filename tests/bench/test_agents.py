from tests.bench.agents import MODEL_LENS, PeerRun, Round, _rows
from tests.bench.workload import AGENTS, Moment, Run

KINDS = [(kind, length) for length in MODEL_LENS for kind in ("posix", "dense")]


def a_round(running: int, tail_bytes: int) -> Round:
    """All runs alike, each of one step with somebody waiting."""
    moment = Moment(running, 1, 1000 - tail_bytes, tail_bytes, 2**20)
    return Round({kind: Run([moment], 2.0, 3, 0) for kind in KINDS}, PeerRun(2**22, 4.0))


def verdicts(done: list[Round]) -> list[bool]:
    return [row.goal.met for row in _rows(done) if row.goal is not None]


def test_all_agents_must_run_at_once_in_every_round_and_waste_little() -> None:
    assert verdicts([a_round(AGENTS, 30)] * 2) == [True, True, True]
    assert verdicts([a_round(AGENTS, 30), a_round(AGENTS - 1, 30)]) == [False, True, True]
    assert verdicts([a_round(AGENTS, 50)]) == [True, False, False]


def test_bytes_stand_beside_those_of_mlx_lm() -> None:
    (row,) = (row for row in _rows([a_round(AGENTS, 30)]) if row.peer_name == "mlx-lm")
    assert (row.quire, row.peer, row.ratio.value) == (1.0, 4.0, 4.0)
