"""Tokens are chosen as a slow and obvious reference in double precision chooses them."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.step.sampler import noise_table
from metal_ext import CpuWorkers, choose_tokens, instruction_sets
from tests.sampling import exact_noise

VOCABS = (1, 15, 16, 17, 1000, 8191, 8193)
LARGE = 151_936
WORKERS = CpuWorkers(2)


@dataclass(frozen=True)
class Choice:
    """A row of choices."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    number: int = 0
    """Rows with other numbers get other noise."""

    def row(self) -> tuple[float, ...]:
        return (self.temperature, self.top_k, self.top_p, self.min_p)

    def key(self) -> np.ndarray:
        return np.random.default_rng(self.number).integers(0, 2**32, 2, dtype=np.uint32)


GREEDY = Choice(temperature=0.0)
KINDS = (
    Choice(),
    Choice(temperature=0.3),
    Choice(temperature=2.0),
    Choice(top_k=1),
    Choice(top_k=7, temperature=1.5),
    Choice(top_k=600),
    Choice(top_k=10**6),
    Choice(top_p=0.9),
    Choice(top_p=0.3, temperature=0.7),
    Choice(top_p=1e-6),
    Choice(min_p=0.1),
    Choice(min_p=1.0),
    Choice(top_k=20, top_p=0.95, temperature=0.6),
    Choice(top_k=50, top_p=0.8, min_p=0.02),
    Choice(top_k=50, top_p=0.99, min_p=0.6),
    Choice(temperature=1e30),
    Choice(temperature=1e-30),
)


def choose(
    adjusted: np.ndarray,
    choices: list[Choice],
    workers: CpuWorkers = WORKERS,
    raw: np.ndarray | None = None,
) -> tuple[list[int], list[bool]]:
    changed = mx.array(adjusted)
    given = changed if raw is None else mx.array(raw)
    rows = mx.array([choice.row() for choice in choices], dtype=mx.float32)
    keys = mx.array(np.array([choice.key() for choice in choices]))
    ids, finite = choose_tokens(given, changed, rows, keys, noise_table(), workers)
    mx.eval(ids, finite)
    assert (ids.dtype, ids.shape) == (mx.int32, (len(choices),))
    assert (finite.dtype, finite.shape) == (mx.bool_, (len(choices),))
    return ids.tolist(), finite.tolist()  # type: ignore[return-value]


def logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * 3


def kept(row: np.ndarray, choice: Choice) -> np.ndarray:
    """The probabilities that the filters leave, in float64."""
    weights = np.exp((row.astype(np.float64) - row.max()) / np.float32(choice.temperature))
    falling = -np.sort(-weights)
    if 0 < choice.top_k < len(row):
        falling = falling[: choice.top_k]
    inside = np.ones(len(falling), bool)
    if choice.top_p < 1:
        inside = np.cumsum(falling) - falling < np.float32(choice.top_p) * falling.sum()
    floor = max(falling[inside].min(), np.float32(choice.min_p))
    left = np.where(weights >= floor * (1 - 1e-6), weights, 0)
    shares: np.ndarray = left / left.sum()
    return shares


def agrees(got: int, row: np.ndarray, choice: Choice) -> bool:
    """Whether the token is the reference's, or one that rounding to float32 may have made of it."""
    found = []
    noise = exact_noise(choice.key()[None], len(row))[0]
    for top_p in {choice.top_p, choice.top_p * (1 - 1e-6), min(1.0, choice.top_p * (1 + 1e-6))}:
        with np.errstate(divide="ignore"):
            scores = np.log(kept(row, replace(choice, top_p=top_p))) + noise
        found.append(bool(scores[got] >= scores.max() - 3e-5))
    return any(found)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("vocab", VOCABS)
def test_draws_are_those_of_the_reference(vocab: int, instruction_set: str) -> None:
    workers = CpuWorkers(2, instruction_set)
    choices = [replace(k, number=n) for k, n in itertools.product(KINDS, range(6))]
    x = logits(len(choices), vocab, seed=vocab)
    ids, finite = choose(x, choices, workers)
    assert all(finite)
    for got, row, choice in zip(ids, x, choices, strict=True):
        assert agrees(got, row, choice), choice


@pytest.mark.parametrize("kind", KINDS[:-2], ids=str)
def test_draws_from_a_large_vocabulary_are_those_of_the_reference(kind: Choice) -> None:
    x = logits(3, LARGE, seed=1)
    choices = [replace(kind, number=n) for n in range(3)]
    for got, row, choice in zip(choose(x, choices)[0], x, choices, strict=True):
        assert agrees(got, row, choice)


@pytest.mark.parametrize("vocab", [*VOCABS, LARGE])
def test_without_a_temperature_it_is_the_first_of_the_largest(vocab: int) -> None:
    x = logits(4, vocab)
    x[1] = -5.0
    x[2, vocab // 2 :] = 100.0
    x[3] = -np.inf
    x[3, vocab - 1] = -1000.0
    raw = logits(4, vocab, seed=1)
    assert choose(x, [GREEDY] * 4, raw=raw)[0] == x.argmax(axis=-1).tolist()


@pytest.mark.parametrize(
    "kind", [Choice(top_k=1), Choice(top_p=1e-6), Choice(min_p=1.0), Choice(temperature=1e-30)]
)
@pytest.mark.parametrize("vocab", VOCABS)
def test_filters_that_leave_one_token_leave_the_likeliest(vocab: int, kind: Choice) -> None:
    x = logits(1, vocab)
    for number in range(3):
        assert choose(x, [replace(kind, number=number)])[0] == [int(x.argmax())]


@pytest.mark.parametrize("kind", [Choice(top_k=2), Choice(top_p=0.1), Choice(min_p=1.0)])
def test_tokens_that_are_as_likely_as_the_last_one_that_stays_stay_too(kind: Choice) -> None:
    x = logits(1, 1000)
    tied = [3, 40, 41, 999]
    x[0, tied] = 20.0
    choices = [replace(kind, number=n) for n in range(64)]
    assert set(choose(x.repeat(64, 0), choices)[0]) == set(tied)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("vocab", [2, 17, 1000, 20_000])
def test_where_all_but_one_are_masked_it_is_that_one(vocab: int, kind: Choice) -> None:
    rows = [replace(kind, number=n) for n in range(3)]
    for allowed in (0, vocab // 2, vocab - 1):
        x = np.full((3, vocab), -np.inf, np.float32)
        x[:, allowed] = -3.0
        assert choose(x, rows, raw=logits(3, vocab)) == ([allowed] * 3, [True] * 3)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_masked_tokens_are_never_chosen(kind: Choice) -> None:
    x = logits(64, 9000)
    x[:, ::2] = -np.inf
    ids, _ = choose(x, [replace(kind, number=n) for n in range(64)], raw=logits(64, 9000))
    assert all(token % 2 for token in ids)


def test_a_huge_temperature_makes_all_tokens_alike() -> None:
    choices = [Choice(temperature=1e30, number=n) for n in range(100)]
    noise = exact_noise(np.array([choice.key() for choice in choices]), 1000)
    assert choose(logits(100, 1000), choices)[0] == noise.argmax(axis=-1).tolist()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocab", [1, 16, 17, 1000, 20_000])
def test_a_row_that_is_not_finite_is_told_and_touches_no_other(vocab: int, poison: float) -> None:
    choices = [GREEDY, Choice(), Choice(top_p=0.9), Choice(top_k=5), Choice(number=8)]
    x = logits(5, vocab)
    clean = choose(x, choices)[0]
    for at in {0, vocab // 2, vocab - 1}:
        for spoilt in range(5):
            raw = x.copy()
            raw[spoilt, at] = poison
            expected = [0 if row == spoilt else token for row, token in enumerate(clean)]
            good = [row != spoilt for row in range(5)]
            assert choose(raw, choices) == (expected, good)
            assert choose(x, choices, raw=raw) == (expected, good)


@pytest.mark.parametrize("kind", [*KINDS, GREEDY], ids=str)
def test_a_token_always_comes_out_whatever_the_changed_logits_are(kind: Choice) -> None:
    x = logits(4, 300)
    x[0] = -np.inf
    x[1, 70:90] = np.inf
    x[2] = np.nan
    x[3, 5] = np.nan
    ids, finite = choose(x, [kind] * 4, raw=logits(4, 300))
    assert (ids[:3], finite) == ([0, 70, 0], [True] * 4)
    assert 0 <= ids[3] < 300
    assert ids[3] != 5


@pytest.mark.parametrize("vocab", [50, 40_000])
def test_a_row_gets_the_same_token_in_any_company_on_any_number_of_threads(vocab: int) -> None:
    choices = [replace(kind, number=n) for n, kind in enumerate(KINDS)]
    x = logits(len(choices), vocab, seed=8)
    together = choose(x, choices, CpuWorkers(1))
    for threads in (2, 3, 40):
        assert choose(x, choices, CpuWorkers(threads)) == together
    for i, choice in enumerate(choices):
        assert choose(x[i : i + 1], [choice], CpuWorkers(3))[0] == together[0][i : i + 1]


def test_tokens_can_be_used_before_they_are_known_and_inputs_may_be_views() -> None:
    x = logits(4, 600)
    wide = mx.array(x).T
    choices = mx.array([[0.0, 0, 1, 0]] * 8, dtype=mx.float32)[::2]
    keys = mx.zeros((2, 4), mx.uint32).T
    ids, _ = choose_tokens(wide.T, wide.T, choices, keys, noise_table(), WORKERS)
    assert (mx.arange(600)[ids] * 2).tolist() == (x.argmax(axis=-1) * 2).tolist()


def test_arrays_that_do_not_fit_are_refused() -> None:
    x = mx.zeros((2, 10))
    choices = mx.zeros((2, 4))
    keys = mx.zeros((2, 2), mx.uint32)
    noise = noise_table()
    for place, bad in (
        (0, x[0]),
        (0, x.astype(mx.float16)),
        (0, mx.zeros((0, 10))),
        (1, mx.zeros((2, 9))),
        (1, x.astype(mx.bfloat16)),
        (2, mx.zeros((2, 5))),
        (2, mx.zeros((1, 4))),
        (3, keys[:1]),
        (3, keys.astype(mx.int32)),
        (4, noise[:, 1:]),
        (4, noise.astype(mx.float16)),
    ):
        given: list[Any] = [x, x, choices, keys, noise, WORKERS]
        given[place] = bad
        with pytest.raises(ValueError, match=r"float32|uint32"):
            choose_tokens(*given)
