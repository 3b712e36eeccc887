"""A mixture of experts over packed layers, against float64."""

import itertools
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from metal_ext import (
    CpuWorkers,
    PackedExperts,
    PackedLinear,
    gated_mlp,
    instruction_sets,
    mixture_mlp,
    packed_bytes,
)
from tests.metal_ext.layers import Floats, exact, normal, same_bits
from tests.metal_ext.packed import KINDS, PLAIN, Codes, Joined, Kind, Part, gated, normed, part

EPS = 1e-6
# Of a row's own size: a product's 1e-5 of the sum of magnitudes, three times over.
TOLERANCE = 1e-4
HIDDEN, INNER, EXPERTS, CHOSEN = 128, 96, 11, 3
EACH_SET = pytest.mark.parametrize("instruction_set", instruction_sets())
SOME_KINDS = [KINDS[0], KINDS[1], KINDS[3], KINDS[4], KINDS[11]]
EACH_KIND = pytest.mark.parametrize("kind", SOME_KINDS, ids=str)
SHARED = pytest.mark.parametrize("shared_inner", [0, 64], ids=["alone", "with a shared one"])


def stack(parts: list[list[Part]], workers: CpuWorkers) -> PackedExperts:
    """parts: of each expert, one behind the other."""
    weights: list[mx.array] = []
    codes: list[Codes | None] = []
    for same in zip(*parts, strict=True):
        weights.append(mx.stack([its.weight for its in same]))
        groups = [its.codes for its in same]
        if groups[0] is None:
            codes.append(None)
            continue
        found = [its for its in groups if its is not None]
        biases = [its[1] for its in found if its[1] is not None]
        scales = mx.stack([its[0] for its in found])
        codes.append((scales, mx.stack(biases), *found[0][2:]))
    return PackedExperts(weights, workers, codes)


@dataclass(frozen=True)
class Mixture:
    """An MLP of experts, packed and in float64."""

    router: Joined
    gate_up: list[list[Part]]
    down: list[Part]
    shared: tuple[Joined, Joined] | None
    weight: mx.array
    """Of the norm."""
    packed_gate_up: PackedExperts
    packed_down: PackedExperts
    normalised: bool = True
    chosen: int = CHOSEN
    gate: str = "silu"
    biases: tuple[mx.array, mx.array, mx.array] | None = None

    def run(self, x: mx.array, workers: CpuWorkers) -> mx.array:
        return mixture_mlp(
            x,
            self.weight,
            EPS,
            self.router.packed,
            self.packed_gate_up,
            self.packed_down,
            self.chosen,
            self.normalised,
            self.shared and (self.shared[0].packed, self.shared[1].packed),
            workers,
            gate=self.gate,
            biases=self.biases,
        )

    def expected(self, x: Floats) -> Floats:
        rows = normed(x, exact(self.weight), EPS)
        router, gate_up, down = map(exact, self.biases or [mx.zeros((len(self.down), 1))] * 3)
        logits = self.router.expected(rows)
        logits[:, : len(router)] += router.reshape(1, -1) if self.biases else 0
        scores = np.exp(logits[:, : len(self.down)])
        scores /= scores.sum(axis=1, keepdims=True)
        out = x.copy()
        for row, score, logit, to in zip(rows, scores, logits, out, strict=True):
            best = np.argsort(-score, kind="stable")[: self.chosen]
            shares = score[best] / (score[best].sum() if self.normalised else 1.0)
            for expert, share in zip(best, shares, strict=True):
                both = np.concatenate([row @ its.numbers.T for its in self.gate_up[expert]])
                inner = gated((both + gate_up[expert])[None], self.gate)
                to += share * ((inner @ self.down[expert].numbers.T)[0] + down[expert])
            if self.shared is not None:
                both = gated(self.shared[0].expected(row[None]), self.gate)
                to += self.shared[1].expected(both)[0] / (1 + np.exp(-logit[-1]))
        return out


def mixture(kind: Kind, workers: CpuWorkers, shared_inner: int = 0, inner: int = INNER) -> Mixture:
    """A random one, whose router is of 8 bits where the experts are codes."""
    of_router = Kind(kind.dtype, 8, kind.group) if kind.bits else kind
    gate_up = [[part(inner, HIDDEN, kind, 2 * e + i) for i in (0, 1)] for e in range(EXPERTS)]
    down = [part(HIDDEN, inner, kind, 100 + expert) for expert in range(EXPERTS)]
    shared = None
    routers = [part(EXPERTS, HIDDEN, of_router, 7)]
    if shared_inner:
        parts = [part(shared_inner, HIDDEN, kind, 8 + number) for number in (0, 1)]
        shared = Joined(parts, workers), Joined([part(HIDDEN, shared_inner, kind, 10)], workers)
        routers.append(part(1, HIDDEN, of_router, 11))
    return Mixture(
        Joined(routers, workers),
        gate_up,
        down,
        shared,
        0.1 * (1 + 0.2 * normal((HIDDEN,), mx.float32, 12)),
        stack(gate_up, workers),
        stack([[its] for its in down], workers),
    )


def inner_of(kind: Kind) -> int:
    return max(INNER // (kind.group or 1), 1) * (kind.group or INNER) if kind.bits else 41


@EACH_SET
@EACH_KIND
@SHARED
def test_a_mixture_is_the_exact_one(kind: Kind, instruction_set: str, shared_inner: int) -> None:
    workers = CpuWorkers(2, instruction_set)
    its = mixture(
        kind, workers, max(shared_inner, kind.group) if shared_inner else 0, inner_of(kind)
    )
    for rows, normalised in ((1, True), (7, False), (200, True)):
        changed = replace(its, normalised=normalised)
        x = 3 * normal((rows, HIDDEN), mx.float32, rows)
        want = changed.expected(exact(x))
        off = np.abs(exact(changed.run(x, workers)) - want)
        assert off.max() < TOLERANCE * np.abs(want).max(), rows


@EACH_SET
@pytest.mark.parametrize("gate", ["gelu_tanh", "clamped_silu"])
def test_a_mixture_with_biases_and_another_gate_is_the_exact_one(
    gate: str, instruction_set: str
) -> None:
    workers = CpuWorkers(2, instruction_set)
    shapes = (EXPERTS,), (EXPERTS, 2 * INNER), (EXPERTS, HIDDEN)
    router, gate_up, down = (normal(shape, mx.float32, n) for n, shape in enumerate(shapes))
    its = replace(mixture(PLAIN, workers), gate=gate, biases=(router, 4 * gate_up, down))
    for rows in (1, 40):
        x = 3 * normal((rows, HIDDEN), mx.float32, rows)
        want, got = its.expected(exact(x)), its.run(x, workers)
        assert np.abs(exact(got) - want).max() < TOLERANCE * np.abs(want).max()
        assert same_bits(its.run(x[:1], workers), got[:1])


@EACH_SET
@EACH_KIND
@SHARED
def test_a_row_has_the_same_bits_in_any_company_and_on_any_number_of_threads(
    kind: Kind, instruction_set: str, shared_inner: int
) -> None:
    one = CpuWorkers(1, instruction_set)
    its = mixture(kind, one, max(shared_inner, kind.group) if shared_inner else 0, inner_of(kind))
    # More than go at a time; more of one expert than a product takes.
    x = mx.concatenate([normal((300, HIDDEN), mx.float32), normal((1, HIDDEN), mx.float32, 1)])
    x = mx.concatenate([x, mx.broadcast_to(x[:1], (300, HIDDEN))])
    whole = its.run(x, one)
    for threads in (2, 5):
        assert same_bits(its.run(x, CpuWorkers(threads, instruction_set)), whole)
    cuts = (0, 1, 2, 5, 21, 60, 190, 301, 601)
    pieces = [its.run(x[a:b], one) for a, b in itertools.pairwise(cuts)]
    assert same_bits(mx.concatenate(pieces), whole)
    assert same_bits(its.run(x[::-1], CpuWorkers(3, instruction_set)), whole[::-1])
    assert same_bits(whole[301:], mx.broadcast_to(whole[:1], (300, HIDDEN)))


@EACH_SET
def test_one_expert_of_one_is_a_dense_mlp(instruction_set: str) -> None:
    """All of its weight is one, and what is added is the same, in the same order."""
    workers = CpuWorkers(2, instruction_set)
    its = mixture(PLAIN, workers)
    single = [[its.gate_up[0][0], its.gate_up[0][1]]]
    router = PackedLinear([mx.zeros((1, HIDDEN))], workers, [])
    both, down = Joined(single[0], workers), Joined([its.down[0]], workers)
    x = normal((40, HIDDEN), mx.float32)
    got = mixture_mlp(
        x, its.weight, EPS, router, stack(single, workers), stack([[its.down[0]]], workers), 1,
        False, None, workers,
    )  # fmt: skip
    want = gated_mlp(x, its.weight, EPS, both.packed, down.packed, workers)
    assert same_bits(got, want)


# --- the router ----------------------------------------------------------------------------------


def told(logits: list[list[float]], chosen: int, *, normalised: bool = False) -> Floats:
    """What each expert is multiplied by: expert e adds its weight to number e of a row."""
    workers = CpuWorkers(1)
    experts = len(logits[0])
    # Row r is unit vector r, of which the norm makes 1; SiLU(32) is 32.
    rows = np.zeros((experts, 16), np.float32)
    rows[:, : len(logits)] = np.array(logits).T
    gates = np.zeros((experts, 32, 16), np.float32)
    gates[:, 0], gates[:, 16] = 32.0, 1 / 32
    down = np.zeros((experts, 16, 16), np.float32)
    for expert in range(experts):
        down[expert, expert, 0] = 1.0
    x = mx.eye(16)[: len(logits)]
    got = mixture_mlp(
        x,
        mx.full((16,), 0.25),
        0.0,
        PackedLinear([mx.array(rows)], workers, []),
        PackedExperts([mx.array(gates)], workers, []),
        PackedExperts([mx.array(down)], workers, []),
        chosen,
        normalised,
        None,
        workers,
    )
    return exact(got - x)[:, :experts]


def test_of_experts_with_equal_shares_the_first_ones_are_chosen() -> None:
    got = told([[0.0] * 8, [0, 1, 0, 1, 0, 1, 0, 1], [3, 3, 3, 3, 9, 3, 3, 3]], 3)
    assert [np.flatnonzero(row).tolist() for row in got] == [[0, 1, 2], [1, 3, 5], [0, 1, 4]]


def test_weights_are_shares_of_all_experts_or_of_those_that_are_chosen() -> None:
    logits = np.array([[0.5, -1.0, 2.0, 0.25, 1.0, -3.0]])
    shares = np.exp(logits) / np.exp(logits).sum()
    best = [2, 4]
    np.testing.assert_allclose(told(logits.tolist(), 2)[0][best], shares[0][best], rtol=1e-5)
    whole = told(logits.tolist(), 2, normalised=True)[0]
    np.testing.assert_allclose(whole[best], shares[0][best] / shares[0][best].sum(), rtol=1e-5)
    assert np.count_nonzero(whole) == 2


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    got = told([[1e30, 0.0, -1e30], [-1e30, -1e30, -1e30], [200.0, 199.0, -200.0]], 2)
    np.testing.assert_allclose(got[0], [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(got[1], [1 / 3, 1 / 3, 0], rtol=1e-5)
    np.testing.assert_allclose(got[2], [1 / (1 + np.exp(-1)), 1 / (1 + np.e), 0], rtol=1e-5)


@EACH_SET
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(instruction_set: str, bad: float) -> None:
    workers = CpuWorkers(2, instruction_set)
    its = mixture(Kind(mx.bfloat16, 4, 32), workers, 64)
    for rows in (3, 40):
        x = normal((rows, HIDDEN), mx.float32)
        ill = mx.array(x)
        ill[1, 5] = bad
        want, got = its.run(x, workers), its.run(ill, workers)
        others = mx.array([row for row in range(rows) if row != 1])
        assert same_bits(got[others], want[others])
        assert not mx.any(mx.isfinite(got[1])).item()


def test_a_stack_has_the_bytes_of_its_experts() -> None:
    packed = PackedExperts([mx.ones((3, 64, 32))], CpuWorkers(1), [])
    assert packed.nbytes == 3 * packed_bytes(32, [(64, mx.float32, 0, 0)])
