"""A mixture's four kernels: route, expert_gates, expert_downs and mix."""

from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.models import mlx_ops
from engine.models.spec import Experts, Gate
from tests.metal.kernels.device import (
    GATE_OUTPUTS,
    MAX_PAIRS,
    PRODUCT_OUTPUTS,
    PRODUCT_THREADS,
    ROUTE_THREADS,
    TILE_ROWS,
    Buffer,
    Device,
    dtype,
    struct,
)
from tests.metal.kernels.formats import FORMATS, Floats, Stored
from tests.metal.kernels.memory import Addresses, exact_copy
from tests.metal.kernels.packed import GROUP_SHIFT, PACKINGS, SMALL, Packed, pack
from tests.metal.kernels.reference import gated

# Of the largest number: float32's sums, and half a unit in the last place of a few numbers.
ROUNDING = {"float": 3e-6, "half": 2.0**-10, "bfloat": 2.0**-7}
GATES = (Gate.SILU, Gate.GELU, Gate.CLAMPED_SILU)
Whole = NDArray[np.uint32]
IN_ALL_FORMATS = pytest.mark.parametrize(
    ("name", "packing"),
    [
        pytest.param(*each, marks=[pytest.mark.small] if " ".join(each) in SMALL else [])
        for each in product(FORMATS, PACKINGS)
    ],
)


@dataclass(frozen=True)
class Routed:
    """What route writes."""

    weights: NDArray[np.float32]
    order: Whole
    tiles: NDArray[np.void]

    def chosen(self, pair: int) -> int:
        """The expert of the pair with that number."""
        (place,) = np.flatnonzero(self.order == pair)
        (tile,) = (t for t in self.tiles if t["first"] <= place < t["first"] + t["count"])
        return int(tile["expert"])

    @property
    def experts(self) -> NDArray[np.int_]:
        """[rows][chosen]"""
        pairs = range(self.weights.size)
        return np.array([self.chosen(pair) for pair in pairs]).reshape(self.weights.shape)


def most_tiles(rows: int, experts: int, chosen: int, *, shared: bool) -> int:
    """For any choice of experts."""
    pairs = rows * chosen
    own = (pairs + (TILE_ROWS - 1) * min(pairs, experts)) // TILE_ROWS
    return own + (-(-rows // TILE_ROWS) if shared else 0)


def route(
    device: Device, name: str, logits: Stored, chosen: int, *, normalised: bool, shared: bool
) -> Routed:
    rows, experts = logits.shape
    tiles = most_tiles(rows, experts, chosen, shared=shared)
    arguments = struct("RouteArguments", rows, experts, chosen, normalised, shared, tiles)
    (given, kept), pairs = exact_copy(logits), rows * (chosen + shared)
    # One of each behind the last, which stays.
    weights = np.full(rows * chosen + 1, np.nan, np.float32)
    order = np.full(pairs + 1, 1 << 31, np.uint32)
    written = np.full(tiles + 1, 1 << 31, dtype("ExpertTile"))
    buffers: list[Buffer] = [given, weights, order, written, arguments]
    device.threadgroups(f"route_{name}", buffers, (1,), (ROUTE_THREADS,))
    assert kept.start <= given
    assert np.isnan(weights[-1])
    assert order[-1] == written[-1]["expert"] == 1 << 31
    return Routed(weights[:-1].reshape(rows, chosen), order[:-1], written[:-1])


def check_tiles(routed: Routed, experts: int, *, shared: bool) -> None:
    """Every pair is in one tile of its expert; pairs and experts ascend; the rest is empty."""
    rows, chosen = routed.weights.shape
    pairs = rows * chosen
    assert sorted(routed.order) == [*range(pairs + rows * shared)]
    tiles = [tuple(map(int, tile)) for tile in routed.tiles]
    used = [tile for tile in tiles if tile[2]]
    assert all(tile == (0, 0, 0, 0) for tile in tiles[len(used) :])
    alone = -(-rows // TILE_ROWS) if shared else 0
    covered = []
    for number, (expert, first, count, unused) in enumerate(used):
        assert (expert == experts) == (number < alone)
        assert 1 <= count <= TILE_ROWS
        assert unused == 0
        covered += [*range(first, first + count)]
    assert sorted(covered) == [*range(len(routed.order))]
    own = used[alone:]
    assert own == sorted(own)
    for tile, following in pairwise(own):
        assert tile[0] < following[0] or tile[2] == TILE_ROWS, "a tile is cut too early"
    for _, first, count, _ in used:
        of_tile = routed.order[first : first + count].tolist()
        assert of_tile == sorted(of_tile)
    assert routed.order[pairs:].tolist() == [*range(pairs, len(routed.order))]


def shares_of(name: str, logits: Stored, chosen: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Each row's softmax, rounded; and of which rows float32 is certain to choose the same."""
    number = FORMATS[name]
    wide = number.decode(logits)
    exact = np.exp(wide - wide.max(axis=1, keepdims=True))
    exact /= exact.sum(axis=1, keepdims=True)
    low, shares, high = (number.decode(number.encode(exact * (1 + e))) for e in (-1e-6, 0, 1e-6))
    best = -np.sort(-exact, axis=1)[:, : chosen + 1]
    if name == "float":
        return shares, np.all(best[:, :-1] > best[:, 1:] * (1 + 2e-6), axis=1)
    return shares, np.all((low == high) | (exact < 0.99 * best[:, -1:]), axis=1)


@pytest.mark.small
@pytest.mark.parametrize(
    ("experts", "chosen", "rows"),
    [(4, 1, 1), (4, 4, 5), (32, 4, 9), (128, 8, 8), (256, 8, 3), (512, 10, 4), (64, 32, 2)],
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_s_best_experts_are_chosen(
    device: Device, name: str, experts: int, chosen: int, rows: int
) -> None:
    random = np.random.default_rng(experts + chosen)
    logits = FORMATS[name].encode(random.normal(size=(rows, experts)) * 2)
    shares, certain = shares_of(name, logits, chosen)
    assert certain.mean() > 0.5
    best = np.argsort(-shares, axis=1, kind="stable")[:, :chosen]
    for normalised, shared in ((True, False), (False, True)):
        found = route(device, name, logits, chosen, normalised=normalised, shared=shared)
        check_tiles(found, experts, shared=shared)
        assert np.array_equal(found.experts[certain], best[certain])
        want = np.take_along_axis(shares, found.experts, axis=1)
        want /= want.sum(axis=1, keepdims=True) if normalised else 1
        assert np.allclose(found.weights[certain], want[certain], rtol=4e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_they_are_those_of_mlx(device: Device, name: str) -> None:
    logits = FORMATS[name].encode(np.random.default_rng(5).normal(size=(64, 128)))
    spec = Experts(experts=128, chosen=8, inner_size=1, normalised=False)
    typed = mx.array(logits)
    typed = typed.view(mx.bfloat16) if name == "bfloat" else typed
    experts, weights = mlx_ops.route(typed, spec)
    found = route(device, name, logits, 8, normalised=False, shared=False)
    _, certain = shares_of(name, logits, 8)
    assert np.array_equal(found.experts[certain], np.array(experts)[certain])
    wide = np.array(weights.astype(mx.float32))
    assert np.allclose(found.weights[certain], wide[certain], rtol=3e-6, atol=0)


@pytest.mark.small
@pytest.mark.parametrize("name", FORMATS)
def test_of_equal_experts_those_with_lower_numbers_are_chosen(device: Device, name: str) -> None:
    logits = np.zeros((2, 100))
    logits[0, [99, 40, 77]] = 1.0
    found = route(device, name, FORMATS[name].encode(logits), 6, normalised=True, shared=False)
    assert found.experts.tolist() == [[40, 77, 99, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert np.allclose(found.weights[1], 1 / 6)


@pytest.mark.small
def test_what_is_no_number_stays_in_its_row(device: Device) -> None:
    logits = np.random.default_rng(1).normal(size=(4, 32))
    right = route(
        device, "bfloat", FORMATS["bfloat"].encode(logits), 4, normalised=True, shared=True
    )
    logits[1, 7], logits[2, :3] = np.nan, np.inf
    found = route(
        device, "bfloat", FORMATS["bfloat"].encode(logits), 4, normalised=True, shared=True
    )
    check_tiles(found, 32, shared=True)
    assert np.isnan(found.weights[[1, 2]]).all()
    assert np.array_equal(found.weights[[0, 3]], right.weights[[0, 3]])
    assert np.array_equal(found.experts[[0, 3]], right.experts[[0, 3]])


@pytest.mark.parametrize("shared", [False, True])
def test_any_number_of_rows_is_sorted(device: Device, shared: bool) -> None:
    random = np.random.default_rng(2)
    for rows, experts, chosen in ((1, 8, 8), (2, 4, 2), (31, 16, 8), (100, 512, 10), (128, 128, 8)):
        assert rows * chosen <= MAX_PAIRS
        logits = random.normal(size=(rows, experts)) + 2 * random.normal(size=experts)
        encoded = FORMATS["bfloat"].encode(logits)
        check_tiles(
            route(device, "bfloat", encoded, chosen, normalised=True, shared=shared),
            experts,
            shared=shared,
        )


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (256, 8), (512, 10)])
def test_each_expert_is_read_about_once(
    device: Device, experts: int, chosen: int, rows: int, figures: list[str]
) -> None:
    """Of rows that are independent, and of rows that prefer the same experts. Tiles of one expert
    follow each other, so that a cache may have the weights that are read again."""
    random = np.random.default_rng(3)
    for preference in (0.0, 0.5):
        reads = distinct = 0
        for _ in range(8):
            favour = preference * random.normal(size=experts)
            logits = FORMATS["bfloat"].encode(random.normal(size=(rows, experts)) + favour)
            tiles = route(device, "bfloat", logits, chosen, normalised=True, shared=False).tiles
            used = tiles[tiles["count"] > 0]["expert"]
            reads, distinct = reads + len(used), distinct + len(set(used.tolist()))
        figures.append(
            f"{rows} rows, {chosen} of {experts} experts, preference {preference}: the weights of "
            f"{distinct / 8:.0f} experts are read {reads / distinct:.3f} times"
        )
        assert reads <= (1.25 if preference and experts == 128 else 1.1) * distinct


@dataclass(frozen=True)
class Mixture:
    """Weights of one layer. Each list has gate, up and down."""

    name: str
    stacks: list[Packed]
    shared: list[Packed]
    """Those of the shared expert, if there is one."""
    added: list[Stored]
    """Biases ``[experts][outputs]``."""
    chosen: int
    has_biases: bool = False
    kind: Gate = Gate.SILU
    is_fused: bool = False
    """Whether gate and up lie in one stack."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of experts, inner numbers and hidden numbers."""
        experts, inner, hidden = self.stacks[0].numbers.shape
        return experts, inner, hidden

    def mlp(self, row: Floats, expert: int) -> Floats:
        """In float64, but for what kernels round. The shared expert has the number behind all."""
        number, is_own = FORMATS[self.name], expert < self.sizes[0]
        stacks, place = (self.stacks, expert) if is_own else (self.shared, 0)
        gate, up, down = (each.numbers[place] for each in stacks)
        zeros = is_own and self.has_biases
        added = [number.decode(each[place]) * zeros for each in self.added]

        def rounded(numbers: Floats) -> Floats:
            return number.decode(number.encode(numbers))

        gates, ups = (
            rounded(rounded(matrix @ row) + bias)
            for matrix, bias in zip((gate, up), added, strict=False)
        )
        made: Floats = down @ rounded(gated(gates, ups, GATES.index(self.kind))) + added[2]
        return made


def mixture(
    name: str, packing: str, experts: int, inner: int, hidden: int, *, chosen: int,
    shared: bool = False, **fields: Any,
) -> Mixture:  # fmt: skip
    random = np.random.default_rng(experts + inner)
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    stacks, alone = (
        [pack(random, name, packing, count, *size) for size in sizes] for count in (experts, 1)
    )
    added = [FORMATS[name].encode(random.normal(size=(experts, size[0]))) for size in sizes]
    return Mixture(name, stacks, alone if shared else [], added, chosen, **fields)


@dataclass(frozen=True)
class Rows:
    """What a layer is given."""

    x: Stored
    residual: Stored
    logits: Stored
    shared_gate: Stored

    def part(self, which: slice | list[int]) -> "Rows":
        arrays = (self.x, self.residual, self.logits, self.shared_gate)
        return Rows(*(array[which] for array in arrays))


def some_rows(mixed: Mixture, rows: int, seed: int = 0) -> Rows:
    random, (experts, _, hidden) = np.random.default_rng(seed), mixed.sizes
    shapes = ((rows, hidden), (rows, hidden), (rows, experts), (rows,))
    return Rows(*(FORMATS[mixed.name].encode(random.normal(size=shape)) for shape in shapes))


@dataclass
class Bound:
    """Buffers behind whose last byte nothing lies."""

    kept: list[Addresses] = field(default_factory=list)

    def place(self, array: NDArray[Any]) -> int:
        address, addresses = exact_copy(array)
        self.kept.append(addresses)
        return address

    def gate_up(self, gate: list[Stored], up: list[Stored], *, fused: bool) -> list[Buffer]:
        """Of the parts of gate, and then of those of up, from one stack if they are fused."""
        if not fused:
            return [*map(self.place, [*gate, *up])]
        both = [np.concatenate(parts, axis=1) for parts in zip(gate, up, strict=True)]
        firsts = [self.place(each) for each in both]
        ups = (each.nbytes // len(each) // 2 for each in both)
        return [*firsts, *(first + up for first, up in zip(firsts, ups, strict=True))]


def run(device: Device, mixed: Mixture, given: Rows) -> Stored:
    """The four commands. Returns ``[rows][hidden]``."""
    number, bound, (experts, inner, hidden) = FORMATS[mixed.name], Bound(), mixed.sizes
    rows, chosen, shares, fused = len(given.x), mixed.chosen, bool(mixed.shared), mixed.is_fused
    pairs, most = rows * chosen, 1 if rows == 1 else TILE_ROWS
    routed = route(device, mixed.name, given.logits, chosen, normalised=True, shared=shares)
    order, tiles = bound.place(routed.order), bound.place(routed.tiles)
    gate, up, down = (each.parts for each in mixed.stacks)
    shared = [each.parts for each in mixed.shared or mixed.stacks]
    inners = number.nans(pairs + shares * rows + 1, inner)
    products = np.full((len(inners), hidden), np.nan, np.float32)
    own = (pairs, chosen, GROUP_SHIFT, mixed.has_biases, GATES.index(mixed.kind), 0)
    kernel = f"{mixed.name}_{mixed.stacks[0].packing}_{most}"
    device.threadgroups(
        f"expert_gates_{kernel}",
        [
            *(bound.place(given.x), order, tiles),
            *bound.gate_up(gate, up, fused=fused),
            *bound.gate_up(*shared[:2], fused=False),
            *bound.gate_up([mixed.added[0]], [mixed.added[1]], fused=fused),
            *(inners, struct("ExpertArguments", hidden, inner, inner << fused, experts, *own)),
        ],
        (len(routed.tiles), -(-inner // GATE_OUTPUTS)),
        (PRODUCT_THREADS,),
    )
    device.threadgroups(
        f"expert_downs_{kernel}",
        [
            *(bound.place(inners[:-1]), order, tiles),
            *map(bound.place, [*down, *shared[2], mixed.added[2]]),
            *(products, struct("ExpertArguments", inner, hidden, hidden, experts, *own)),
        ],
        (len(routed.tiles), -(-hidden // PRODUCT_OUTPUTS)),
        (PRODUCT_THREADS,),
    )
    assert np.isnan(number.decode(inners)[-1]).all()
    assert np.isnan(products[-1]).all()
    out, threads = number.nans(rows + 1, hidden), (hidden // 4, rows)
    given_to_mix = (products[:-1], routed.weights, given.shared_gate, given.residual)
    arguments = struct("MixArguments", hidden, rows, chosen, shares)
    buffers: list[Buffer] = [*map(bound.place, given_to_mix), out, arguments]
    device.threads(f"mix_{mixed.name}", buffers, threads, (min(threads[0], 96),))
    assert np.isnan(number.decode(out)[-1]).all()
    return out[:-1]


def expected(device: Device, mixed: Mixture, given: Rows) -> Floats:
    """Of the experts that route has chosen."""
    number, sums = FORMATS[mixed.name], []
    routed = route(device, mixed.name, given.logits, mixed.chosen, normalised=True, shared=False)
    x, residual, opening = map(number.decode, (given.x, given.residual, given.shared_gate))
    for row, experts, weights, its in zip(x, routed.experts, routed.weights, opening, strict=True):
        total = np.zeros(len(row))
        for expert, weight in zip(experts, weights, strict=True):
            total += weight * mixed.mlp(row, expert)
        if mixed.shared:
            total += mixed.mlp(row, mixed.sizes[0]) / (1 + np.exp(-its))
        sums.append(number.decode(number.encode(total)))
    return residual + np.array(sums)


def check_against_float64(device: Device, mixed: Mixture, rows: int) -> None:
    given = some_rows(mixed, rows)
    found = FORMATS[mixed.name].decode(run(device, mixed, given))
    want = expected(device, mixed, given)
    assert np.abs(found - want).max() <= ROUNDING[mixed.name] * np.abs(want).max()
    number, zeros = FORMATS[mixed.name], np.zeros_like(given.residual)
    alone = number.decode(run(device, mixed, replace(given, residual=zeros)))
    added = number.decode(number.encode(alone + number.decode(given.residual)))
    assert np.array_equal(found, added), "the residual is added to a sum that was rounded"


@IN_ALL_FORMATS
def test_a_mixture_is_that_of_float64(device: Device, name: str, packing: str) -> None:
    for rows, shared in ((1, True), (9, True), (9, False)):
        mixed = mixture(name, packing, 4, 64, 96, shared=shared, chosen=3)
        check_against_float64(device, mixed, rows)


@pytest.mark.small
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", GATES)
def test_so_is_one_with_biases_of_gpt_oss(device: Device, kind: Gate, fused: bool) -> None:
    for name, packing in (("half", "mxfp4"), ("bfloat", "affine4")):
        mixed = mixture(
            name, packing, 5, 96, 64, has_biases=True, chosen=4, kind=kind, is_fused=fused
        )
        check_against_float64(device, mixed, 6)


@pytest.mark.parametrize(("inner", "hidden"), [(768, 2048), (512, 544), (544, 2880)])
def test_so_are_those_of_published_sizes(device: Device, inner: int, hidden: int) -> None:
    """Also of sizes where some lanes have one pass of numbers less."""
    for packing, rows in zip(PACKINGS, (1, 5, 2, 4), strict=True):
        mixed = mixture("bfloat", packing, 3, inner, hidden, shared=True, chosen=2, is_fused=True)
        check_against_float64(device, mixed, rows)


@IN_ALL_FORMATS
def test_a_row_has_the_same_bits_in_any_company(ordered: Device, name: str, packing: str) -> None:
    """Also in another order, and in tiles of other sizes and at other places of them."""
    mixed = mixture(name, packing, 6, 64, 64, shared=True, chosen=2)
    given = some_rows(mixed, 13)
    together = run(ordered, mixed, given)
    for row in range(13):
        assert np.array_equal(run(ordered, mixed, given.part([row]))[0], together[row])
    for seed in (1, 2, 3):
        ordered.set_order(seed)
        assert np.array_equal(run(ordered, mixed, given), together)
        which = np.random.default_rng(seed).permutation(13)[: 3 * seed].tolist()
        assert np.array_equal(run(ordered, mixed, given.part(which)), together[which])


def test_so_it_has_in_a_company_of_64(device: Device) -> None:
    mixed = mixture("bfloat", "affine4", 16, 512, 128, shared=True, chosen=8)
    given = some_rows(mixed, 64)
    together = run(device, mixed, given)
    for first, rows in ((0, 1), (63, 1), (5, 2), (17, 8), (30, 33)):
        part = slice(first, first + rows)
        assert np.array_equal(run(device, mixed, given.part(part)), together[part])
