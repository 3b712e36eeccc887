"""How fast prompts are computed."""

from engine.types import EngineStats
from server.cluster.replica import PromptSpeed


def stats(tokens: int, seconds: float) -> EngineStats:
    return EngineStats(timed_prompt_tokens=tokens, timed_prompt_seconds=seconds)


def test_speed_is_that_of_the_time_that_prompts_take() -> None:
    speed = PromptSpeed()
    assert speed.of(EngineStats()) == 0
    assert speed.of(stats(1000, 10.0)) == 0  # too few
    assert speed.of(stats(2000, 20.0)) == 100.0
    assert speed.of(stats(2000, 20.0)) == 100.0  # nothing but answers since
    assert speed.of(stats(4000, 30.0)) == 4000 / 30


def test_what_is_long_past_counts_less() -> None:
    speed = PromptSpeed()
    assert speed.of(stats(40_000, 400.0)) == 100.0
    assert speed.of(stats(60_000, 500.0)) == 40_000 / 300


def test_tokens_whose_steps_took_no_time_say_nothing() -> None:
    assert PromptSpeed().of(stats(5000, 0.0)) == 0
