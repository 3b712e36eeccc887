from engine.step.scheduler import resting_sequences
from engine.step.sequence import Sequence
from engine.types import SamplingParams
from tests.engines import request_of


def sequences(*costs_s: float) -> list[Sequence]:
    made = [
        Sequence(request_of(number, (1, 2), SamplingParams(9)), number, number, 11)
        for number in range(len(costs_s))
    ]
    for sequence, cost_s in zip(made, costs_s, strict=True):
        sequence.note_mask(cost_s)
    return made


def test_where_all_masks_fit_nobody_rests() -> None:
    assert resting_sequences(sequences(0.02, 0.02, 0.01, 0.0), 0.05) == set()


def test_who_costs_more_than_a_share_takes_turns_and_all_others_go_on() -> None:
    running = sequences(0.03, 0.0, 0.03, 0.001, 0.03, 0.001)
    gone = []
    for _ in range(6):
        resting = resting_sequences(running, 0.05)
        gone.append({0, 2, 4} - resting)
        assert resting < {0, 2, 4}
    assert gone[:3] == gone[3:]
    assert [len(turn) for turn in gone] == [1] * 6
    assert set().union(*gone[:3]) == {0, 2, 4}


def test_one_goes_on_however_much_it_costs() -> None:
    running = sequences(3.0, 2.0)
    assert resting_sequences(running, 0.05) == {1}
    assert resting_sequences(running, 0.05) == {0}


def test_a_form_that_was_costly_once_is_soon_taken_for_a_simple_one() -> None:
    (sequence,) = sequences(0.4)
    for _ in range(12):
        sequence.note_mask(0.0001)
    assert sequence.mask_s < 0.001
