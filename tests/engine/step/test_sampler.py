"""The batched sampler against slow, obvious references."""

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.step.plan import NOT_FINITE
from engine.step.sampler import noise, noise_table
from engine.step.sequence import Sequence
from engine.types import SamplingParams
from metal_ext import CpuWorkers
from tests.engines import request_of
from tests.sampling import exact_noise, sample_next

VOCAB = 50


def sequence(
    params: SamplingParams, generated: tuple[int, ...] = (), prompt: tuple[int, ...] = (1, 2)
) -> Sequence:
    request = request_of(1, prompt, params)
    made = Sequence(request, 1, arrival=0, max_tokens=params.max_tokens)
    made.token_ids += generated
    return made


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 10} | changes))


Run = Callable[[np.ndarray, list[Sequence]], list[Any]]


@pytest.fixture(params=["mlx", "threads"])
def run(request: pytest.FixtureRequest) -> Run:
    """Samples with MLX's operations, as on a GPU, and with one operation on the CPU's threads."""
    workers = CpuWorkers(2) if request.param == "threads" else None

    def run(logits: np.ndarray, sequences: list[Sequence]) -> list[Any]:
        return sample_next(mx.array(logits), sequences, workers)

    return run


def logits(rows: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 3


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: np.ndarray = e / e.sum(axis=-1, keepdims=True)
    return out


def kept(row: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The probabilities that filters leave of a row, step by step."""
    probabilities = softmax(row.astype(np.float64) / p.temperature)
    order = np.argsort(-probabilities, kind="stable")
    keep = np.ones(VOCAB, bool)
    if p.top_k:
        keep[order[p.top_k :]] = False
    inside = probabilities * keep
    share = p.top_p * inside.sum()
    total = 0.0
    for token in order:
        if total >= share:
            keep[token] = False
        total += inside[token]
    keep &= probabilities >= p.min_p * probabilities.max()
    left: np.ndarray = probabilities * keep / (probabilities * keep).sum()
    return left


def key(seed: int, index: int) -> np.ndarray:
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    return np.frombuffer(digest, "<u4")


def reference(row: np.ndarray, p: SamplingParams, index: int) -> int:
    with np.errstate(divide="ignore"):
        scores = np.log(kept(row, p)) + exact_noise(key(p.seed, index)[None], VOCAB)[0]
    return int(scores.argmax())


def excess(counts: np.ndarray, shares: np.ndarray) -> float:
    """By how many standard deviations Pearson's chi-square exceeds its mean."""
    assert not counts[shares == 0].any()
    expected = shares[shares > 0] * counts.sum()
    terms = (counts[shares > 0] - expected) ** 2 / expected
    return float((terms.sum() - len(terms) + 1) / np.sqrt((2 + 1 / expected).sum()))


def test_temperature_zero_takes_the_likeliest_token(run: Run) -> None:
    x = logits(3)
    results = run(x, [sequence(params(temperature=0.0))] * 3)
    assert [r.token_id for r in results] == x.argmax(axis=-1).tolist()


filters = pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_p": 0.5},
        {"top_p": 0.9, "temperature": 1.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB + 5},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 0.6},
    ],
)


@filters
def test_the_largest_sum_of_logit_and_noise_is_drawn(run: Run, changes: dict[str, Any]) -> None:
    x = logits(1, seed=3)[0]
    for seed in range(200):
        p = params(seed=seed, **changes)
        (got,) = run(x[None], [sequence(p, generated=(4,) * 3)])
        assert got.token_id == reference(x, p, index=3), f"seed {seed}"


@filters
def test_frequencies_are_those_that_filters_leave(run: Run, changes: dict[str, Any]) -> None:
    x = logits(1, seed=1)
    kinds = [params(seed=seed, **changes) for seed in range(4000)]
    drawn = run(x.repeat(4000, 0), [sequence(p, (4,) * (p.seed % 3)) for p in kinds])
    counts = np.bincount([each.token_id for each in drawn], minlength=VOCAB)
    assert excess(counts, kept(x[0], kinds[0])) < 4


def test_tokens_of_positions_and_of_seeds_are_independent(run: Run) -> None:
    x = np.tile(np.log(np.array([[5, 3, 1, 1]], np.float32)), (4000, 1))
    shares = np.outer([5, 3, 1, 1], [5, 3, 1, 1]).ravel() / 100
    rows = [[sequence(params(seed=s), (4,) * at) for s in range(4000)] for at in range(3)]
    tokens = np.array([[each.token_id for each in run(x, some)] for some in rows])
    pairs = [(tokens[0], tokens[1]), (tokens[0], tokens[2]), (tokens[1], tokens[2])]
    pairs += [(tokens[:, :-lag], tokens[:, lag:]) for lag in (1, 2, 256)]
    for one, other in pairs:
        counts = np.bincount((4 * one + other).ravel(), minlength=16)
        assert abs(excess(counts, shares)) < 4


def test_a_cpu_draws_the_tokens_that_a_gpu_draws() -> None:
    x = np.random.default_rng(5).normal(size=(256, 5000)).astype(np.float32) * 3
    changes: list[dict[str, Any]] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01}]
    for at in range(16):
        kinds = [params(seed=s, temperature=0.5 + s % 7, **changes[s % 4]) for s in range(256)]
        rows = [sequence(p, (4,) * at) for p in kinds]
        tokens = [sample_next(mx.array(x), rows, workers) for workers in (None, CpuWorkers(2))]
        assert tokens[0] == tokens[1]


def test_what_a_row_gets_does_not_depend_on_who_shares_the_batch(run: Run) -> None:
    x = logits(8, seed=4)
    kinds = [
        params(temperature=0.0),
        params(seed=1),
        params(seed=2, top_p=0.7),
        params(seed=3, top_k=5),
        params(seed=4, min_p=0.2, temperature=1.5),
        params(seed=5, presence_penalty=1.0, frequency_penalty=0.5),
        params(seed=6, repetition_penalty=1.3, top_k=10, top_p=0.9),
        params(seed=7, logit_bias=((3, 5.0), (9, -100.0)), logprobs=4),
    ]
    history = (7, 8, 8, 9)
    together = run(x, [sequence(p, history) for p in kinds])
    alone = [run(x[i : i + 1], [sequence(p, history)])[0] for i, p in enumerate(kinds)]
    assert [r.token_id for r in together] == [r.token_id for r in alone]
    half = run(x[4:], [sequence(p, history) for p in kinds[4:]])
    assert half == together[4:]


def test_a_row_that_is_not_filtered_keeps_its_whole_tail_beside_one_that_is(run: Run) -> None:
    x = np.random.default_rng(6).normal(size=(2, 60_000)).astype(np.float32) * 2
    for seed in range(30):
        free = params(seed=seed)
        beside = run(x, [sequence(free), sequence(params(seed=1, top_p=0.9))])[0]
        assert beside == run(x[:1], [sequence(free)])[0]


def test_noise_is_gumbels_to_a_hundred_thousandth() -> None:
    keys = np.array([key(seed, 7) for seed in range(4)])
    got = np.array(noise(mx.array(keys), 200_000))
    assert np.abs(got - exact_noise(keys, 200_000)).max() < 1e-5
    numbers = np.array([1, 2, 3, 5, 1000, 2**30, 2**31 - 1, -(2**31), -(2**30), -1000, -3, -1])
    bits = numbers.astype(np.float32).view(np.uint32)
    values, slopes = np.array(noise_table())
    tails = values[bits >> 16] + slopes[bits >> 16] * (bits & 0xFFFF)
    expected = -np.log(-np.log1p(-(numbers % 2**32) / 2**32))
    assert tails == pytest.approx(expected, abs=1e-5)


def test_noise_where_all_logits_are_alike_and_at_the_ends_of_temperatures(run: Run) -> None:
    x = np.full((1, VOCAB), -50.0, np.float32)
    x[0, 10:20] = 1.0
    winner = int(exact_noise(key(3, 0)[None], VOCAB)[0, 10:20].argmax()) + 10
    for changes in ({}, {"top_k": 5}, {"top_p": 0.1}, {"temperature": 1e-38}):
        assert run(x, [sequence(params(seed=3, **changes))])[0].token_id == winner
    (got,) = run(logits(1), [sequence(params(seed=3, temperature=1e38))])
    assert got.token_id == exact_noise(key(3, 0)[None], VOCAB).argmax()


def test_presence_and_frequency_penalties_count_generated_tokens_only(run: Run) -> None:
    x = np.zeros((1, VOCAB), np.float32)
    x[0, 1] = 2.0  # in the prompt
    x[0, 5] = 1.9
    p = params(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.3)
    assert run(x, [sequence(p)])[0].token_id == 1
    assert run(x, [sequence(p, generated=(1,))])[0].token_id == 5, "2.0 - 0.5 - 0.3 < 1.9"
    x[0, 5] = 1.0
    assert run(x, [sequence(p, generated=(1,))])[0].token_id == 1
    assert run(x, [sequence(p, generated=(1, 1, 1))])[0].token_id == 5, "2.0 - 0.5 - 0.9 < 1.0"


def test_the_repetition_penalty_counts_the_prompt_and_divides_or_multiplies(run: Run) -> None:
    x = np.full((1, VOCAB), -5.0, np.float32)
    x[0, 1] = 2.0
    x[0, 5] = 1.5
    p = params(temperature=0.0, repetition_penalty=2.0)
    assert run(x, [sequence(p)])[0].token_id == 5, "2.0 / 2 < 1.5"
    x[0, 1], x[0, 5] = -1.0, -1.5
    assert run(x, [sequence(p)])[0].token_id == 5, "-1.0 * 2 < -1.5"


def test_the_whole_history_counts_however_long_it_is(run: Run) -> None:
    x = np.zeros((1, VOCAB), np.float32)
    x[0, 1] = 1.0
    history = (1, *([2, 3] * 500))
    p = params(temperature=0.0, presence_penalty=1.5)
    assert run(x, [sequence(p, generated=history)])[0].token_id not in (1, 2, 3)


def test_histories_of_different_lengths_share_a_batch(run: Run) -> None:
    x = np.zeros((2, VOCAB), np.float32)
    x[:, 4] = 1.0
    p = params(temperature=0.0, presence_penalty=2.0)
    rows = [sequence(p, generated=(4,)), sequence(p, generated=tuple(range(10, 40)))]
    assert run(x, rows)[0].token_id != 4
    assert run(x, rows)[1].token_id == 4


def test_a_bias_is_added_and_rows_without_one_keep_their_logits(run: Run) -> None:
    x = logits(2, seed=6)
    best = x.argmax(axis=-1)
    biased = params(temperature=0.0, logit_bias=((int(best[0]), -100.0), (17, 100.0)))
    results = run(x, [sequence(biased), sequence(params(temperature=0.0))])
    assert [r.token_id for r in results] == [17, int(best[1])]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails_alone(run: Run, poison: float) -> None:
    x = logits(3)
    x[1, 20] = poison
    results = run(x, [sequence(params(seed=s, top_p=0.9)) for s in range(3)])
    assert results[1] == NOT_FINITE
    clean = run(logits(3), [sequence(params(seed=s, top_p=0.9)) for s in range(3)])
    assert [results[0], results[2]] == [clean[0], clean[2]]


def test_log_probabilities_are_those_of_the_model_before_anything_changes_them(run: Run) -> None:
    x = logits(1, seed=9)
    p = params(temperature=0.2, presence_penalty=2.0, logprobs=5, seed=1)
    (result,) = run(x, [sequence(p, generated=(3, 4))])
    expected = np.log(softmax(x.astype(np.float64))[0])
    assert result.logprobs is not None
    assert result.token_id is not None
    assert result.logprobs.logprob == pytest.approx(expected[result.token_id], abs=1e-5)
    order = np.argsort(-expected)[:5]
    assert [token for token, _ in result.logprobs.top] == order.tolist()
    assert [value for _, value in result.logprobs.top] == pytest.approx(
        expected[order].tolist(), abs=1e-5
    )


def test_rows_report_as_many_alternatives_as_each_asked_for(run: Run) -> None:
    wanted = [None, 0, 2, VOCAB + 9]
    results = run(logits(4), [sequence(params(temperature=0.0, logprobs=n)) for n in wanted])
    counts = [None if r.logprobs is None else len(r.logprobs.top) for r in results]
    assert counts == [None, 0, 2, VOCAB]


def test_sixteen_bit_logits_are_sampled_as_floats() -> None:
    x = mx.array(logits(1)).astype(mx.bfloat16)
    (result,) = sample_next(x, [sequence(params(temperature=0.0, logprobs=1))])
    assert result.token_id == mx.argmax(x).item()
