import math
import random

import pytest

from engine.step.token_budget import (
    ALONE_TARGETS,
    CALM_FRACTION,
    LONGEST_ALONE_S,
    MAX_GROWTH,
    MAX_SLOWDOWN,
    TokenBudget,
)


def budget(tokens: int = 64, minimum: int = 16, maximum: int = 2048, tile: int = 1) -> TokenBudget:
    return TokenBudget(0.1, minimum, maximum, tokens, tile)


@pytest.mark.parametrize(
    ("tile", "before", "prefill", "seconds", "after"),
    [
        pytest.param(1, 200, 200, 0.4, 50, id="a slow step shrinks the limit at once"),
        pytest.param(1, 200, 100, 0.2, 50, id="from what the step really ran"),
        pytest.param(1, 100, 100, 0.001, int(100 * MAX_GROWTH), id="a fast full step grows it"),
        pytest.param(1, 100, 99, 0.001, 100, id="one that was not full says nothing"),
        pytest.param(1, 100, 100, 0.05 * (1 + CALM_FRACTION), 100, id="near the target"),
        pytest.param(32, 32, 32, 0.1 / 2.1 * CALM_FRACTION, 64, id="two tiles keep to the target"),
        pytest.param(32, 32, 32, 0.1 / 1.9 * CALM_FRACTION, 32, id="two tiles do not"),
        pytest.param(32, 64, 32, 0.001, 64, id="a tile less is not full"),
        pytest.param(32, 64, 33, 0.001, 96, id="a part of a tile less is full"),
    ],
)
def test_a_step_changes_the_limit(
    tile: int, before: int, prefill: int, seconds: float, after: int
) -> None:
    b = budget(before, tile=tile)
    b.observe(prefill, seconds)
    assert b.tokens == after


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


@pytest.mark.parametrize("row_s", [1e-4, 3e-4, 7e-4, 1e-3, 4e-3, 2e-2])
def test_budgets_are_whole_tiles_and_one_at_least(row_s: float) -> None:
    b = budget(tile=32)
    for _ in range(60):
        b.observe(b.tokens, row_s * b.tokens)
        b.observe(b.alone, row_s * b.alone, decoding=False)
        assert b.tokens % 32 == b.alone % 32 == 0
        assert min(b.tokens, b.alone) >= 32


@pytest.mark.parametrize(
    ("rows", "room"), [(0, 64), (1, 63), (16, 48), (17, 79), (31, 65), (32, 64), (40, 56)]
)
def test_rows_that_decode_and_a_chunk_are_whole_tiles_together(rows: int, room: int) -> None:
    b = budget(tile=32)
    for decoding in (True, False):
        assert b.chunk(b.room(decoding=decoding), 0, rows) == room


def test_a_limit_that_is_no_whole_tile_is_rounded_down_and_one_below_a_tile_holds() -> None:
    small = budget(20, maximum=31, tile=32)
    assert (budget(maximum=100, tile=32).maximum, small.maximum, small.tokens) == (96, 31, 31)
    assert small.chunk(31, 0) == 32, "the scheduler's own limit cuts it"


def test_where_rows_are_computed_one_by_one_any_number_is_a_budget() -> None:
    assert [budget(tokens=61).chunk(61, 0, rows) for rows in (0, 7)] == [61, 61]


def test_what_is_left_behind_another_chunk_fills_the_tile_or_is_nothing() -> None:
    b = budget(tile=32)
    assert b.chunk(54, 0, 10, first=False) == 54
    assert b.chunk(16, 0, 64, first=False) == 0
    assert b.chunk(2.5, 0, 75, first=False) == 0, "a few rows more than full tiles"
    b.pair_cost = 1e-4
    assert b.chunk(100, 100_000, 75, first=False) == 9, "attention has no tiles"
    assert [b.chunk(5, 100_000, first=first) for first in (True, False)] == [2, 0]


# --- contexts ---------------------------------------------------------------------------------

CONTEXTS = (0, 10_000, 100_000, 260_000)
# Seconds of a token without context, and of attending to one token, of small to large models.
DEVICES = [(2e-4, 5e-8), (6e-4, 4e-8), (3e-4, 3e-8), (5e-3, 1.5e-7), (1e-3, 0.0), (1e-4, 2e-8)]


class ModelledDevice:
    """A device whose steps of prompts take rows x (a + b x context), ``a`` for whole tiles."""

    def __init__(
        self, token_s: float, pair_s: float, tile: int = 1, fixed_s: float = 0.0, noise: float = 0.0
    ) -> None:
        self.token_s, self.pair_s, self.fixed_s = token_s, pair_s, fixed_s
        self._noise, self._random = noise, random.Random(7)
        self.budget = TokenBudget(0.1, 16, 2048, 64, tile=tile)

    def prompt(self, start: int, tokens: int, *, beside_s: float = 0.0) -> float:
        """Compute a prompt's tokens behind cached ones; return the time of the longest step.
        beside_s: the time that sequences that generate take in each step."""
        times, decoding, end = [], beside_s > 0, start + tokens
        while start < end:
            room = self.budget.room(decoding=decoding)
            count = min(self.budget.chunk(room, start, int(decoding)), end - start)
            pairs = count * start + count * (count - 1) // 2
            rows = math.ceil(count / self.budget.tile) * self.budget.tile
            seconds = self.fixed_s + beside_s + rows * self.token_s + pairs * self.pair_s
            times.append(seconds * (1 + self._noise * self._random.uniform(-1, 1)))
            self.budget.observe(count, times[-1], decoding=decoding, pairs=pairs)
            start += count
        return max(times)


@pytest.mark.parametrize("tile", [1, 32])
@pytest.mark.parametrize(("token_s", "pair_s"), DEVICES)
def test_the_pause_keeps_to_the_target_behind_any_context(
    token_s: float, pair_s: float, tile: int
) -> None:
    device = ModelledDevice(token_s, pair_s, tile)
    device.prompt(0, 262_144)  # what is behind cached tokens was computed once
    # A tile of products cannot be cut.
    slack, tile_s = (1.1, 0.0) if tile == 1 else (1.5, tile * token_s)
    for context in (*CONTEXTS, *reversed(CONTEXTS)):
        assert device.prompt(context, 600) <= slack * ALONE_TARGETS * 0.1 + tile_s, context
    device.prompt(0, 50_000, beside_s=0.02)
    for context in (*CONTEXTS, *reversed(CONTEXTS)):
        assert device.prompt(context, 600, beside_s=0.02) <= slack * 0.1 + tile_s, context


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("prompts", [[2048] * 6, [20_000], [50, 4000, 120, 9000], [31, 900] * 9])
@pytest.mark.parametrize(
    ("fixed_s", "token_s", "least"),
    [(0.57, 19e-4, 1.8), (0.2, 45e-5, 1.4), (0.4, 1e-3, 1.8), (1.0, 2e-3, 1.7), (0.3, 3e-3, 1.2)],
)
def test_where_even_few_tokens_take_long_steps_of_prompts_alone_get_longer(
    prompts: list[int], noise: float, fixed_s: float, token_s: float, least: float
) -> None:
    """By the time of a token, beside that of steps that take ALONE_TARGETS times the target."""
    device = ModelledDevice(token_s, 0.0, 32, fixed_s, noise)
    longest = [device.prompt(0, prompt) for prompt in prompts * 2]
    room = device.budget.room(decoding=False)
    before = max(32, (0.8 * ALONE_TARGETS * 0.1 - fixed_s) / token_s)
    each, each_before = (fixed_s / rows + token_s for rows in (room, before))
    assert each_before > least * each
    assert max(longest) < (1 + noise) * 1.5 * LONGEST_ALONE_S


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("token_s", [1e-4, 3e-4, 1e-3, 3e-3])
def test_where_time_grows_with_the_tokens_steps_of_prompts_keep_to_their_target(
    token_s: float, noise: float
) -> None:
    device = ModelledDevice(token_s, 0.0, 32, 0.02, noise)
    longest = [device.prompt(0, prompt) for prompt in [2048, 300, 50, 9000, 700] * 5]
    assert max(longest) < (1 + 2 * noise) * ALONE_TARGETS * 0.1 + 32 * token_s


@pytest.mark.parametrize(("token_s", "pair_s"), DEVICES)
def test_the_cost_of_a_context_is_learnt_and_leaves_the_limit_of_short_prompts(
    token_s: float, pair_s: float
) -> None:
    device = ModelledDevice(token_s, pair_s)
    device.prompt(0, 262_144)
    assert device.budget.pair_cost == pytest.approx(pair_s / token_s, rel=0.05)
    before = device.budget.alone
    device.prompt(260_000, 2000)
    assert device.budget.alone >= 0.9 * before


@pytest.mark.parametrize("start", [0, 700, 4001, 100_000])
def test_a_chunk_behind_any_context_fills_the_limit(start: int) -> None:
    b = budget(tokens=800)
    b.pair_cost = 2.5e-4
    count = b.chunk(800, start)
    assert count * b.weight(start, count) <= 800 < (count + 1) * b.weight(start, count + 1)
    b.observe(count, 0.001, pairs=count * start + count * (count - 1) // 2)
    assert b.tokens > 800, "the step was full"


def test_a_small_step_teaches_nothing() -> None:
    b = budget(tokens=100)
    b.observe(20, 0.4, pairs=20 * 100_000, decoding=False)
    b.observe(20, 0.1, decoding=False)
    b.observe(100, 0.1, pairs=100 * 100_000, decoding=False)
    assert (b.pair_cost, b.token_s) == (0.0, 0.0), "no token in a short context was measured"


def test_the_time_of_a_part_of_a_prompt_grows_with_the_tokens_before_it() -> None:
    limits = budget(tokens=64)
    assert limits.seconds(0, 100) == 0.0, "nothing is measured yet"
    limits.token_s, limits.pair_cost = 0.01, 0.001
    assert limits.seconds(0, 1) == pytest.approx(0.01)
    assert limits.seconds(0, 101) == pytest.approx(1.01 * 1.05)
    assert limits.seconds(1000, 1101) == pytest.approx(1.01 * 2.05)
