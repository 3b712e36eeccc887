import pytest

from tests.bench.constraints import StepTimes, rows


@pytest.mark.parametrize(("cost", "met"), [(9.0, True), (11.0, False)])
def test_constraints_should_take_a_tenth_of_a_step(cost: float, met: bool) -> None:
    judged, grammar = rows([StepTimes(100.0, cost, cost / 2)] * 3)
    assert (judged.quire, judged.peer) == (cost, 100.0)
    assert judged.goal is not None
    assert judged.goal.met is met
    assert grammar.quire == cost / 2
    assert grammar.goal is None
