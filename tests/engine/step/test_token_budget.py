import pytest

from engine.step.token_budget import (
    ALONE_TARGETS,
    CALM_FRACTION,
    MAX_GROWTH,
    MAX_SLOWDOWN,
    TokenBudget,
)


def budget(tokens: int = 64, minimum: int = 16, maximum: int = 2048) -> TokenBudget:
    return TokenBudget(target_s=0.1, minimum=minimum, maximum=maximum, tokens=tokens)


def test_a_slow_step_shrinks_the_budget_at_once() -> None:
    b = budget(tokens=200)
    b.observe(200, 0.4)
    assert b.tokens == 50


def test_the_shrinking_starts_from_what_the_step_really_ran() -> None:
    b = budget(tokens=200)
    b.observe(100, 0.2)
    assert b.tokens == 50


def test_a_fast_full_step_grows_the_budget_by_a_bounded_factor() -> None:
    b = budget(tokens=100)
    b.observe(100, 0.001)
    assert b.tokens == int(100 * MAX_GROWTH)


def test_a_step_that_was_not_full_says_nothing_about_growth() -> None:
    b = budget(tokens=100)
    b.observe(99, 0.001)
    assert b.tokens == 100


def test_a_step_near_the_target_changes_nothing() -> None:
    b = budget(tokens=100)
    b.observe(100, 0.1 * (1 + CALM_FRACTION) / 2)
    assert b.tokens == 100


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 5.0), (10, 0.0), (10, -1.0)])
def test_steps_without_prefill_or_without_a_time_change_no_budget(
    tokens: int, seconds: float
) -> None:
    b = budget()
    b.observe(tokens, seconds)
    b.observe(tokens, seconds, decoding=False)
    assert (b.tokens, b.alone) == (64, 64)


def test_prompts_alone_have_a_budget_and_a_longer_time_of_their_own() -> None:
    b = budget(tokens=100)
    b.observe(100, ALONE_TARGETS * 0.1 * 0.9, decoding=False)
    assert b.room(decoding=False) == 100
    b.observe(100, ALONE_TARGETS * 0.1 * 2, decoding=False)
    assert b.room(decoding=False) == 50
    assert b.room(decoding=True) == 100


def test_beside_slow_decoding_prompts_do_not_starve() -> None:
    """Where decoding alone takes 90 of 100 ms, a step of prompts may take three times that."""
    b = budget(tokens=100)
    for _ in range(3):
        b.observe(0, 0.09)
    for _ in range(40):
        b.observe(b.tokens, 0.09 + 0.002 * b.tokens)
    assert 0.6 * (MAX_SLOWDOWN - 1) * 0.09 <= 0.002 * b.tokens <= (MAX_SLOWDOWN - 1) * 0.09


def test_one_slow_step_of_decoding_alone_lengthens_the_target_little() -> None:
    b = budget(tokens=100)
    for _ in range(20):
        b.observe(0, 0.01)
    b.observe(0, 0.1)
    b.observe(100, 0.2)
    assert b.tokens == 50


def test_the_limits_hold() -> None:
    b = budget()
    for _ in range(50):
        b.observe(b.tokens, 0.0001)
    assert b.tokens == 2048
    for _ in range(50):
        b.observe(b.tokens, 100.0)
    assert b.tokens == 16


@pytest.mark.parametrize("cost_s", [0.0001, 0.0005, 0.001, 0.004])
def test_it_settles_where_a_step_takes_about_the_target(cost_s: float) -> None:
    b = budget()
    times = []
    for _ in range(60):
        seconds = 0.002 + b.tokens * cost_s
        times.append(seconds)
        b.observe(b.tokens, seconds)
    assert 0.6 * b.target_s <= times[-1] <= b.target_s
    assert max(times[1:]) <= 3 * b.target_s


# --- tiles ------------------------------------------------------------------------------------


def tiled(tokens: int = 64, minimum: int = 16, maximum: int = 2048) -> TokenBudget:
    return TokenBudget(0.1, minimum, maximum, tokens, tile=32)


@pytest.mark.parametrize("row_s", [1e-4, 3e-4, 7e-4, 1e-3, 4e-3, 2e-2])
def test_budgets_are_whole_tiles_and_one_at_least(row_s: float) -> None:
    b = tiled()
    for _ in range(60):
        b.observe(b.tokens, row_s * b.tokens)
        b.observe(b.alone, row_s * b.alone, decoding=False)
        assert b.tokens % 32 == b.alone % 32 == 0
        assert min(b.tokens, b.alone) >= 32


def test_a_budget_of_one_tile_grows_by_one_where_two_keep_to_the_target() -> None:
    b = tiled(tokens=32)
    b.observe(32, 0.1 / 2.1 * CALM_FRACTION)
    assert b.tokens == 64
    b = tiled(tokens=32)
    b.observe(32, 0.1 / 1.9 * CALM_FRACTION)
    assert b.tokens == 32


def test_a_step_whose_last_tile_is_not_full_was_a_full_step() -> None:
    b = tiled(tokens=64)
    b.observe(32, 0.001)
    assert b.tokens == 64
    b.observe(33, 0.001)
    assert b.tokens == 96


@pytest.mark.parametrize(
    ("rows", "room"), [(0, 64), (1, 63), (16, 48), (17, 79), (31, 65), (32, 64), (40, 56)]
)
def test_rows_that_decode_and_a_chunk_are_whole_tiles_together(rows: int, room: int) -> None:
    b = tiled(tokens=64)
    assert b.room(decoding=True, rows=rows) == b.room(decoding=False, rows=rows) == room


def test_a_limit_that_is_no_whole_tile_is_rounded_down_and_one_below_a_tile_holds() -> None:
    assert (tiled(maximum=100).maximum, tiled(maximum=31, tokens=20).maximum) == (96, 31)
    assert tiled(maximum=31, tokens=20).room(decoding=True) == 31


def test_where_rows_are_computed_one_by_one_any_number_is_a_budget() -> None:
    assert [budget(tokens=61).room(decoding=True, rows=rows) for rows in (0, 7)] == [61, 61]
