"""Masks and what they do to the sampler, against slow, obvious references."""

import logging
import time
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.step.constraints import BROKEN, accept, allowed_drafts, sampling_state
from engine.step.plan import NOT_FINITE, RowError, Scores, Token
from engine.step.sequence import SamplingRow, Sequence
from engine.types import (
    FORM_LIMITS,
    FormLimitError,
    SamplingParams,
    TokenConstraint,
    TokenLogprobs,
)
from metal_ext import CpuWorkers
from tests.engines import Scripted, request_of
from tests.sampling import sample_next

VOCAB = 50


def sequence(
    constraint: TokenConstraint | None = None, generated: int = 0, **changes: Any
) -> Sequence:
    params = SamplingParams(**({"max_tokens": 100} | changes))
    made = Sequence(request_of(1, (1, 2), params), 1, 0, 102, constraint)
    made.token_ids += [3] * generated
    return made


def only(*tokens: int) -> Scripted:
    return Scripted(lambda _: set(tokens))


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * 3


def run(x: np.ndarray, sequences: list[Sequence], workers: CpuWorkers | None = None) -> list[Any]:
    return sample_next(mx.array(x), sequences, workers)


@pytest.mark.parametrize("workers", [None, CpuWorkers(2)], ids=["mlx", "threads"])
@pytest.mark.parametrize("vocab", [31, 32, 33, 50, 64, 1000])
def test_only_allowed_tokens_are_chosen_whatever_the_vocabulary(
    vocab: int, workers: CpuWorkers | None
) -> None:
    allowed = {0, 5, vocab - 1}
    x = logits(1, vocab=vocab)
    best = max(allowed, key=lambda token: float(x[0, token]))
    assert run(x, [sequence(only(*allowed), temperature=0.0)], workers)[0].token_id == best
    drawn = [run(x * 0, [sequence(only(*allowed), seed=s)], workers)[0] for s in range(60)]
    seen = {result.token_id for result in drawn}
    assert seen == allowed


def test_bits_beyond_the_vocabulary_are_never_chosen() -> None:
    class Everything(Scripted):
        def fill_mask(self, row: np.ndarray) -> bool:
            row.fill(0xFFFFFFFF)
            return True

    everything = Everything(lambda _: None)
    x = logits(1, vocab=33)
    assert run(x, [sequence(everything, temperature=0.0)])[0].token_id == int(x.argmax())


def test_rows_without_a_constraint_choose_as_they_do_alone() -> None:
    x = logits(5)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_p": 0.7}]
    free = [sequence(**kind) for kind in kinds]
    alone = run(x[:3], free)
    beside = run(x, [*free, sequence(only(7), temperature=0.0), sequence(only(8, 9), seed=3)])
    assert beside[:3] == alone
    assert beside[3].token_id == 7
    assert beside[4].token_id in (8, 9)


def test_a_constraint_that_allows_everything_changes_nothing() -> None:
    free = Scripted(lambda _: None)
    x = logits(2)
    alone = run(x, [sequence(seed=1), sequence(temperature=0.0)])
    assert run(x, [sequence(free, seed=1), sequence(temperature=0.0)]) == alone
    assert free.accepted == [alone[0].token_id]


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"temperature": 0.1},
        {"presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"logit_bias": ((4, 100.0), (20, -100.0))},
    ],
)
def test_filters_penalties_and_biases_work_on_what_is_allowed(changes: dict[str, Any]) -> None:
    x = logits(1, seed=2)
    for seed in range(30):
        constraint = only(20, 21)
        (got,) = run(x, [sequence(constraint, generated=2, seed=seed, **changes)])
        assert got.token_id in (20, 21)
        assert constraint.accepted == [got.token_id]


def test_log_probabilities_are_those_of_the_model_and_not_of_the_mask() -> None:
    x = logits(1)
    (free,) = run(x, [sequence(temperature=0.0, logprobs=3)])
    (bound,) = run(x, [sequence(only(7), temperature=0.0, logprobs=3)])
    assert bound.logprobs is not None
    assert free.logprobs is not None
    assert bound.logprobs.top == free.logprobs.top
    assert bound.logprobs.logprob < free.logprobs.logprob


def test_a_row_that_is_not_finite_is_found_behind_its_mask_and_nothing_is_accepted() -> None:
    x = logits(2)
    x[0, 40] = np.nan
    constraints = [only(7), only(7)]
    results = run(x, [sequence(constraint, temperature=0.0) for constraint in constraints])
    assert results[0] == NOT_FINITE
    assert results[1].token_id == 7
    assert [constraint.accepted for constraint in constraints] == [[], [7]]


@pytest.mark.parametrize("fault", [{"fills_until": 0}, {"accepts_until": 0}])
def test_a_constraint_that_raises_fails_its_row_alone_and_its_text_is_not_logged(
    fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    x = logits(3)
    broken = Scripted(lambda _: {3}, **fault)
    rows = [sequence(only(5), temperature=0.0), sequence(broken), sequence(temperature=0.0)]
    results = run(x, rows)
    assert results[1] == RowError(BROKEN)
    assert [results[0].token_id, results[2].token_id] == [5, int(x[2].argmax())]
    assert broken.accepted == []
    assert "ValueError" in caplog.text
    assert "text of an answer" not in caplog.text


def test_a_form_that_comes_to_its_limits_fails_its_row_and_says_which() -> None:
    class Tiring(Scripted):
        def fill_mask(self, row: np.ndarray) -> bool:
            raise FormLimitError("it is too large")

    results = run(logits(2), [sequence(), sequence(Tiring(lambda _: None))])
    assert results[0].token_id is not None
    assert results[1] == RowError(f"{FORM_LIMITS}: it is too large")


class Slow(Scripted):
    def fill_mask(self, row: np.ndarray) -> bool:
        started_s = time.thread_time()
        while time.thread_time() - started_s < 0.02:
            pass
        return super().fill_mask(row)

    def __deepcopy__(self, _: dict[int, Any]) -> "Slow":
        return Slow(self.allowed, [*self.accepted])


def test_the_masks_of_all_rows_of_a_sequence_are_its_costs() -> None:
    slow, other = sequence(Slow(lambda _: {1})), sequence(only(2))
    rows = [SamplingRow(slow, (1,) * drafts) for drafts in range(4)]
    sampling_state([*rows, SamplingRow(other)], VOCAB)
    assert slow.mask_s >= 0.08
    assert other.mask_s < 0.01
    sampling_state(rows[:1], VOCAB)
    assert slow.mask_s >= 0.04, "it falls by at most a half"


def test_what_a_mask_costs_is_known_afterwards() -> None:
    slow, free = sequence(Slow(lambda _: {1})), sequence()
    run(logits(2), [slow, free])
    assert slow.mask_s >= 0.02
    assert free.mask_s < 0.01


def test_a_constraint_that_allows_nothing_fails_its_row() -> None:
    (result,) = run(logits(1), [sequence(only())])
    assert result == RowError(BROKEN)


def test_a_broken_row_that_is_not_finite_is_called_that() -> None:
    x = logits(1)
    x[0, 0] = np.inf
    assert run(x, [sequence(Scripted(lambda _: None, fills_until=0))]) == [NOT_FINITE]


# --- min_tokens --------------------------------------------------------------------------------


def test_stop_tokens_are_not_chosen_before_min_tokens() -> None:
    x = logits(1)
    best, second = np.argsort(-x[0])[:2].tolist()
    stops = frozenset({best})
    early = sequence(generated=2, min_tokens=3, stop_token_ids=stops, temperature=0.0)
    assert run(x, [early])[0].token_id == second
    late = sequence(generated=3, min_tokens=3, stop_token_ids=stops, temperature=0.0)
    assert run(x, [late])[0].token_id == best
    assert run(x, [sequence(min_tokens=3, temperature=0.0)])[0].token_id == best, "no stop tokens"
    unknown = sequence(min_tokens=3, stop_token_ids=frozenset({VOCAB + 999}), temperature=0.0)
    assert run(x, [unknown])[0].token_id == best


def test_min_tokens_and_a_constraint_both_hold() -> None:
    wish: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": frozenset({7}), "temperature": 0.0}
    assert run(logits(1), [sequence(only(7, 8), **wish)])[0].token_id == 8
    free = Scripted(lambda _: None)
    x = logits(1)
    x[0, 7] = 50.0
    assert run(x, [sequence(free, **wish)])[0].token_id != 7


def test_a_complete_answer_ends_in_spite_of_min_tokens() -> None:
    wish: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": frozenset({7})}
    assert run(logits(1), [sequence(only(7), **wish)])[0].token_id == 7


# --- beside scores of the prompt ---------------------------------------------------------------


def test_a_constraint_is_told_the_token_that_comes_with_scores() -> None:
    taking, refusing = only(7), Scripted(lambda _: {7}, accepts_until=0)
    scores = Scores((TokenLogprobs(-1.0, ()),), Token(7))
    assert accept(sequence(taking), scores) == scores
    assert taking.accepted == [7]
    assert accept(sequence(refusing), scores) == scores._replace(then=RowError(BROKEN))
    unsampled = scores._replace(then=None)
    assert accept(sequence(taking), unsampled) == unsampled


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_drafts_end_where_the_constraint_forbids_them_or_fails(fails_at: int) -> None:
    def third(accepted: list[int]) -> set[int]:
        return {3 * len(accepted) + 1}

    failing = Scripted(third, fills_until=fails_at)
    assert allowed_drafts(failing, (1, 4, 7, 10), VOCAB) == (1, 4, 7, 10)[:fails_at]
    drafts = tuple(3 * n + 1 + (n == fails_at) for n in range(4))
    assert allowed_drafts(Scripted(third), drafts, VOCAB) == drafts[:fails_at]
    assert failing.accepted == [], "the answer's own constraint stays where it is"
