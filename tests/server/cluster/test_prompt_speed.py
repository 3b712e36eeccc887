"""How fast prompts are computed."""

from engine.figures import Histogram
from engine.types import Distributions, EngineStats
from server.cluster.prompt_speed import PromptSpeed


def stats(prompts: int, answers: int, seconds: float) -> EngineStats:
    steps = Histogram((1.0,))
    steps.observe(seconds)
    measured = Distributions(step_seconds=steps.snapshot)
    return EngineStats(prompt_tokens=prompts, generated_tokens=answers, measured=measured)


def test_speed_is_that_of_times_in_which_prompts_are_computed() -> None:
    speed = PromptSpeed()
    assert speed.of(EngineStats()) == 0
    assert speed.of(stats(1000, 0, 10.0)) == 0  # too few
    assert speed.of(stats(2000, 0, 20.0)) == 100.0
    assert speed.of(stats(2010, 500, 50.0)) == 100.0  # answers, for the most part
    assert speed.of(stats(4010, 500, 60.0)) == 4000 / 30


def test_what_is_long_past_counts_less() -> None:
    speed = PromptSpeed()
    assert speed.of(stats(40_000, 0, 400.0)) == 100.0
    assert speed.of(stats(60_000, 0, 500.0)) == 40_000 / 300
