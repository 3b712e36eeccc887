from engine.figures import (
    DRAFTING_S,
    Distributions,
    Drafting,
    Histogram,
    HistogramCounts,
    StepMeter,
    no_values,
)

BOUNDS = (0.1, 1.0, 10.0)


def test_a_value_belongs_to_the_first_class_that_it_does_not_exceed() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.0, 0.1, 0.5, 1.0, 1.5, 10.0, 11.0, 1e9):
        histogram.observe(value)
    assert histogram.snapshot == HistogramCounts(BOUNDS, (2, 2, 2, 2), 1e9 + 24.1)


def test_a_snapshot_stays_as_it_is() -> None:
    histogram = Histogram(BOUNDS)
    before = histogram.snapshot
    histogram.observe(5.0)
    assert before == no_values(BOUNDS) != histogram.snapshot


def test_the_meter_keeps_three_measures_apart() -> None:
    meter = StepMeter()
    assert meter.snapshot == Distributions()
    meter.step_ran(0.25, 3)
    meter.step_ran(0.5, 32)
    meter.left_queue(7.0)
    seconds, sequences, queue = meter.snapshot
    assert (sum(seconds.counts), seconds.total) == (2, 0.75)
    assert (sum(sequences.counts), sequences.total) == (2, 35)
    assert (sum(queue.counts), queue.total) == (1, 7.0)


def test_drafts_of_the_last_second_of_steps_are_drafting() -> None:
    meter = StepMeter()
    states = [meter.drafting]
    for seconds, drafted in ((0.1, False), (0.1, True), (DRAFTING_S - 0.1, False), (0.1, False)):
        meter.step_ran(seconds, 1, drafted=drafted)
        states.append(meter.drafting)
    resting, drafting = Drafting.RESTING, Drafting.DRAFTING
    assert states == [resting, resting, drafting, drafting, resting]
