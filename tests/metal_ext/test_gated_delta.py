"""A gated delta net between its projections, on every instruction set: against float64, and the
same bits however tokens are cut into steps."""

from dataclasses import fields

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

from metal_ext import CpuWorkers, GatedDelta, StateRows, instruction_sets
from tests.metal_ext.deltas import (
    RIGHT,
    DeltaLayer,
    DeltaShape,
    Inputs,
    Mistakes,
    Slots,
    State,
    run,
    step,
)
from tests.metal_ext.layers import Floats

SHAPES = [
    DeltaShape(),
    DeltaShape(key_heads=1, value_heads=3, key_dim=16, value_dim=48, tail_rows=1),
    DeltaShape(key_heads=2, value_heads=2, key_dim=128, value_dim=128),
    DeltaShape(key_heads=3, value_heads=6, key_dim=208, value_dim=32, tail_rows=7),
]
# Of the largest number that is wanted: float32 over as many tokens.
TOLERANCE = 2e-5
LONG = 150
WORKERS = CpuWorkers(2)
EVERY_SET = pytest.mark.parametrize("instruction_set", instruction_sets())


def distance(got: Floats, want: Floats) -> float:
    """The greatest difference, by the largest number that is wanted."""
    return float(np.abs(got - want).max() / np.abs(want).max())


def distance_of_states(got: State, want: State) -> float:
    return max(distance(got.matrices, want.matrices), distance(got.tail, want.tail))


def same(one: State, other: State) -> bool:
    """Bit by bit."""
    return np.array_equal(one.matrices, other.matrices) and np.array_equal(one.tail, other.tail)


@EVERY_SET
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 64, LONG])
def test_rows_and_states_equal_those_of_float64(
    instruction_set: str, shape: DeltaShape, tokens: int
) -> None:
    layer, workers = DeltaLayer(shape), CpuWorkers(2, instruction_set)
    slots, inputs, begun = Slots(shape), layer.inputs(tokens), layer.state()
    slots.put(0, begun)
    new, later = run(
        layer, slots, [(inputs, None, [(tokens, 1)]), (inputs, 0, [(tokens, 2)])], workers
    )
    for got, before, slot in ((new, layer.zeros(), 1), (later, begun, 2)):
        want, behind = layer.expected(inputs, before)
        assert distance(got, want) < TOLERANCE
        assert distance_of_states(slots.state(slot), behind) < TOLERANCE
    assert distance_of_states(slots.state(0), begun) < 1e-7, "what is only read stays"


@pytest.mark.parametrize("mistake", [field.name for field in fields(Mistakes)])
def test_a_planted_mistake_is_far_from_what_comes_out(mistake: str) -> None:
    shape = DeltaShape(key_heads=2, value_heads=4)
    layer, slots = DeltaLayer(shape), Slots(shape)
    inputs, begun = layer.inputs(5), layer.state()
    slots.put(0, begun)
    (got,) = run(layer, slots, [(inputs, 0, [(5, 1)])], WORKERS)

    def off(mistakes: Mistakes) -> float:
        want, behind = layer.expected(inputs, begun, mistakes)
        return max(distance(got, want), distance_of_states(slots.state(1), behind))

    assert off(RIGHT) < TOLERANCE
    assert off(Mistakes(**{mistake: True})) > 1000 * TOLERANCE


def test_the_recurrence_is_mlx_lms() -> None:
    shape = DeltaShape()
    layer, slots, inputs = DeltaLayer(shape), Slots(shape), DeltaLayer(shape).inputs(40)
    run(layer, slots, [(inputs, None, [(40, 0)])], WORKERS)
    conv, a_log, dt_bias = (layer.arguments[name] for name in ("conv", "a_log", "dt_bias"))
    padded = mx.concatenate([mx.zeros((shape.tail_rows, shape.width)), mx.array(inputs.qkv)])
    mixed = mx.conv1d(padded[None], conv.T[:, :, None], groups=shape.width)
    mixed = mixed * mx.sigmoid(mixed)
    keys = shape.key_heads * shape.key_dim
    q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
    q, k = (x.reshape(1, 40, shape.key_heads, shape.key_dim) for x in (q, k))
    q, k = normalize_qk(q, k, inv_scale=shape.key_dim**-0.5, eps=1e-6)
    v = v.reshape(1, 40, shape.value_heads, shape.value_dim)
    a, b = (mx.array(x)[None] for x in (inputs.a, inputs.b))
    _, state = gated_delta_update(q, k, v, a, b, a_log, dt_bias, None, None, use_kernel=False)
    assert distance(slots.state(0).matrices, np.array(state[0])) < TOLERANCE


# --- bits ----------------------------------------------------------------------------------------


def whole(
    layer: DeltaLayer, inputs: Inputs, begun: State, workers: CpuWorkers
) -> tuple[Floats, State]:
    slots = Slots(layer.shape)
    slots.put(0, begun)
    (made,) = run(layer, slots, [(inputs, 0, [(len(inputs), 0)])], workers)
    return made, slots.state(0)


@EVERY_SET
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize(
    "cuts", [list(range(1, LONG)), [1], [2, 3, 4], [63], [64], [65], [70, 71, 140]], ids=len
)
def test_no_bit_depends_on_how_tokens_are_cut_into_steps(
    instruction_set: str, shape: DeltaShape, cuts: list[int]
) -> None:
    layer, workers = DeltaLayer(shape), CpuWorkers(2, instruction_set)
    inputs, begun = layer.inputs(LONG), layer.state()
    want, behind = whole(layer, inputs, begun, CpuWorkers(1, instruction_set))
    slots, made, slot = Slots(shape), [], 0
    slots.put(0, begun)
    for number, (first, end) in enumerate(zip([0, *cuts], [*cuts, LONG], strict=True)):
        to = slot if number % 2 else 1 - slot  # in place and elsewhere, in turn
        made += run(layer, slots, [(inputs.part(first, end), slot, [(end - first, to)])], workers)
        slot = to
    assert np.array_equal(np.concatenate(made), want)
    assert same(slots.state(slot), behind)


@EVERY_SET
def test_no_bit_depends_on_company_or_on_what_is_written_on_the_way(instruction_set: str) -> None:
    layer = DeltaLayer(DeltaShape())
    inputs, begun = layer.inputs(LONG), layer.state()
    want, behind = whole(layer, inputs, begun, CpuWorkers(1, instruction_set))
    for threads in (1, 2, 5):
        slots, workers = Slots(layer.shape, count=12), CpuWorkers(threads, instruction_set)
        slots.put(0, begun)
        ends = {1: 1, 2: 2, 40: 3, 64: 4, 100: 5, 101: 6, LONG: 0}
        others = [(layer.inputs(n, seed=n), None, [(n, 6 + i)]) for i, n in ((1, 1), (2, 90))]
        made = run(layer, slots, [others[0], (inputs, 0, list(ends.items())), others[1]], workers)
        assert np.array_equal(made[1], want)
        assert same(slots.state(0), behind)
        for end, slot in ends.items():
            assert same(slots.state(slot), whole(layer, inputs.part(0, end), begun, workers)[1])
        for (own, _, _), got, slot in zip(others, made[::2], (7, 8), strict=True):
            alone, state = whole(layer, own, layer.zeros(), workers)
            assert np.array_equal(got, alone)
            assert same(slots.state(slot), state)


def test_many_read_the_same_slot() -> None:
    layer = DeltaLayer(DeltaShape())
    slots, begun = Slots(layer.shape), layer.state()
    slots.put(0, begun)
    parts = [layer.inputs(1, seed) for seed in range(5)]
    made = run(layer, slots, [(its, 0, [(1, 1 + i)]) for i, its in enumerate(parts)], WORKERS)
    for i, its in enumerate(parts):
        want, behind = whole(layer, its, begun, WORKERS)
        assert np.array_equal(made[i], want)
        assert same(slots.state(1 + i), behind)


# --- memory --------------------------------------------------------------------------------------


def test_nothing_is_written_beside_a_state() -> None:
    layer = DeltaLayer(DeltaShape())
    slots = Slots(layer.shape, count=3)
    for slot in range(3):
        slots.raw(slot)[:] = 7.0
    run(layer, slots, [(layer.inputs(70), None, [(70, 1)])], WORKERS)
    assert (slots.raw(0) == 7.0).all()
    assert (slots.raw(2) == 7.0).all()
    assert (slots.raw(1)[: slots.offset // 4] == 7.0).all()
    assert not (slots.raw(1)[slots.offset // 4 :] == 7.0).any()


def test_arrays_may_lie_in_any_way() -> None:
    layer = DeltaLayer(DeltaShape())
    slots, inputs = Slots(layer.shape), layer.inputs(20)
    (want,) = run(layer, slots, [(inputs, None, [(20, 0)])], WORKERS)
    widths = np.cumsum([x.shape[1] for x in inputs.arrays])[:-1].tolist()
    parts = list(mx.split(mx.array(np.concatenate(inputs.arrays, axis=1)), widths, axis=1))
    turned = [mx.contiguous(mx.array(x).T).T for x in inputs.arrays]
    backwards = [mx.array(x[::-1].copy())[::-1] for x in inputs.arrays]
    for arrays in (parts, turned, backwards):
        rows = slots.rows([(20, None, [(20, 1)])])
        _, made = step(layer, arrays, rows, slots.offset, WORKERS)
        assert np.array_equal(np.array(made), want)
        assert same(slots.state(0), slots.state(1))


def test_the_token_orders_a_step_behind_the_one_before() -> None:
    layer = DeltaLayer(DeltaShape())
    slots, inputs = Slots(layer.shape), layer.inputs(30)
    want, behind = whole(layer, inputs, layer.zeros(), WORKERS)
    token, made = mx.zeros((1,)), []
    for t in range(30):
        arrays = [mx.array(x) for x in inputs.part(t, t + 1).arrays]
        rows = slots.rows([(1, 0 if t else None, [(1, 0)])])
        token, row = step(layer, arrays, rows, slots.offset, WORKERS, token)
        made.append(row)
    mx.eval(token)
    assert np.array_equal(np.concatenate([np.array(row) for row in made]), want)
    assert same(slots.state(0), behind)


@pytest.mark.parametrize("before", [1, 13, 58, 60, 62, 63, 64, 127])
def test_drafts_give_their_rows_and_leave_the_state_before_them(before: int) -> None:
    layer = DeltaLayer(DeltaShape())
    slots, inputs, begun = Slots(layer.shape), layer.inputs(7), layer.state()
    others = layer.inputs(before, seed=3)
    want, _ = whole(layer, inputs, begun, WORKERS)
    _, behind = whole(layer, inputs.part(0, 3), begun, WORKERS)
    slots.put(0, begun)
    segments = [(others, None, [(before, 2)]), (inputs, 0, [(2, 1), (3, 0)])]
    _, got = run(layer, slots, segments, WORKERS)
    assert np.array_equal(got, want)
    assert same(slots.state(0), behind), "a tile's border may lie anywhere before the drafts"


# --- refusals ------------------------------------------------------------------------------------


def test_rows_are_refused_without_a_write_or_with_too_many_drafts() -> None:
    slots = Slots(DeltaShape())
    with pytest.raises(ValueError, match="at least one segment"):
        StateRows([], [slots.memory])
    with pytest.raises(ValueError, match="a segment needs a write"):
        slots.rows([(3, None, [])])
    with pytest.raises(ValueError, match="65 rows with drafts; 64 at most"):
        slots.rows([(65, None, [(64, 0)])])
    with pytest.raises(IndexError, match="rows is 2; it must lie between 3 and 3"):
        slots.rows([(3, None, [(2, 0), (2, 1), (3, 2)])])
    assert len(slots.rows([(3, None, [(1, 0), (3, 1)]), (2, None, [(2, 2)])])) == 5


def test_an_address_outside_of_the_memories_is_refused() -> None:
    one, other = Slots(DeltaShape()), Slots(DeltaShape())
    end = other.memory.address + other.memory.bytes
    for address in (end, other.memory.address - 4, other.address(1) + 2, 4):
        with pytest.raises(IndexError, match=f"address is {address}; it must be a multiple of 4"):
            StateRows([(1, address, [(1, one.address(0))])], [one.memory, other.memory])
    assert len(StateRows([(1, one.address(0), [(1, end - 4)])], [one.memory, other.memory])) == 1


def test_a_state_that_does_not_fit_behind_the_offset_is_refused() -> None:
    layer = DeltaLayer(DeltaShape())
    slots, inputs = Slots(layer.shape, count=2), layer.inputs(1)
    room = slots.memory.address + slots.memory.bytes - slots.address(1)
    last = room - 4 * layer.shape.numbers
    arrays = [mx.array(x) for x in inputs.arrays]

    def take(offset: int) -> None:
        rows = slots.rows([(1, None, [(1, 1)])])
        mx.eval(step(layer, arrays, rows, offset, WORKERS))

    take(last)
    with pytest.raises(IndexError, match="bytes of a slot"):
        take(last + 4)
    with pytest.raises(ValueError, match="offset is 6; it must be a multiple of 4"):
        take(6)


def test_constants_that_do_not_fit_the_heads_are_refused() -> None:
    right = DeltaLayer(DeltaShape()).arguments
    conv, a_log, dt_bias, norm = (right[name] for name in ("conv", "a_log", "dt_bias", "norm"))
    GatedDelta(**right)
    for name, value in (
        ("key_dim", 24),
        ("value_dim", 17),
        ("key_heads", 3),
        ("conv", conv[:, 1:]),
        ("conv", conv.astype(mx.float16)),
        ("a_log", a_log[1:]),
        ("dt_bias", dt_bias[None]),
        ("norm", mx.concatenate([norm, norm])),
    ):
        with pytest.raises(ValueError, match=r"multiple of 16|evenly|must be .* float32"):
            GatedDelta(**(right | {name: value}))
