"""The kernels of a gated delta net: against float64, and the same bits however tokens are cut."""

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.metal.kernels.device import Device, dtype, struct
from tests.metal.kernels.formats import FORMATS, Floats, Stored
from tests.metal_ext.deltas import NORM_EPS, DeltaLayer, DeltaShape, Inputs, State

SHAPE = DeltaShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
LAYER = DeltaLayer(SHAPE)
OFFSET = 64
# Of the largest number: float32 over some tokens, and half a unit in the last place of a result.
ROUNDING = {"float": 2e-5, "half": 2.0**-10, "bfloat": 2.0**-7}
SCAN_THREADS, STATE_ROWS = 64, 8
KINDS = ("sparse", "dense")


@dataclass
class Slots:
    """Slots of one layer in one arena, as the kernel of that type reads them."""

    name: str
    count: int = 6

    def __post_init__(self) -> None:
        self.number = FORMATS[self.name]
        self.numbers = int(np.prod(SHAPE.matrices))
        self.tail_bytes = SHAPE.tail_rows * SHAPE.width * self.number.bytes
        self.slot_bytes = OFFSET + 4 * self.numbers + self.tail_bytes
        self.arena: NDArray[np.uint8] = np.full(
            self.count * self.slot_bytes, 0xFF, np.uint8
        )  # NaN in any format

    def place(self, slot: int, kind: str) -> int:
        start = self.arena.ctypes.data if kind == "sparse" else 0
        return start + slot * self.slot_bytes

    def parts(self, slot: int) -> tuple[NDArray[np.float32], Stored]:
        own = self.arena[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
        matrices, tail = np.split(own[OFFSET:], [4 * self.numbers])
        return matrices.view(np.float32), tail.view(self.number.dtype)

    def put(self, slot: int, state: State) -> None:
        matrices, tail = self.parts(slot)
        matrices[:] = state.matrices.ravel()
        tail[:] = self.number.encode(state.tail.ravel())

    def state(self, slot: int) -> State:
        matrices, tail = self.parts(slot)
        decoded = self.number.decode(tail).reshape(SHAPE.tail_rows, SHAPE.width)
        return State(matrices.reshape(SHAPE.matrices).astype(np.float64), decoded)

    def bits(self, slot: int) -> bytes:
        return self.arena[slot * self.slot_bytes : (slot + 1) * self.slot_bytes].tobytes()


Segment = tuple[Inputs, int | None, list[tuple[int, int]]]


def run(device: Device, slots: Slots, segments: list[Segment], kind: str) -> list[Stored]:
    """The kernels, one behind the other; what comes out of each segment."""
    number, first, begun, written = (
        slots.number,
        0,
        list[tuple[int, ...]](),
        list[tuple[int, ...]](),
    )
    for inputs, read, writes in segments:
        slot = 0 if read is None else slots.place(read, kind)
        begun.append((slot, read is not None, first, len(inputs), len(written), len(writes), 0))
        written += [(slots.place(to, kind), rows, 0) for rows, to in writes]
        first += len(inputs)
    rows = np.array(begun, dtype("DeltaSegment")), np.array(written, dtype("DeltaWrite"))
    qkv, z, a, b = (
        number.encode(np.concatenate([getattr(inputs, name) for inputs, _, _ in segments]))
        for name in ("qkv", "z", "a", "b")
    )
    out = number.nans(first, SHAPE.values)
    arguments = struct(
        "DeltaArguments", OFFSET, SHAPE.key_heads, SHAPE.value_heads, SHAPE.tail_rows,
        len(segments), NORM_EPS, first,
    )  # fmt: skip
    conv, a_log, dt_bias, norm = (
        np.array(LAYER.arguments[name]) for name in ("conv", "a_log", "dt_bias", "norm")
    )
    its, heads = (*rows, slots.arena), SHAPE.width // 128
    suffix = f"{slots.name}_128_{kind}"
    mixed = np.full((first, SHAPE.width), np.nan, np.float32)
    gates = np.full((first, SHAPE.value_heads, 2), np.nan, np.float32)
    device.threads(
        f"delta_prepare_{suffix}",
        [qkv, a, b, conv, a_log, dt_bias, *its, mixed, gates, arguments],
        (heads * 32, first),
        (96,),
    )
    device.threadgroups(
        f"delta_scan_{suffix}",
        [mixed, gates, *its, arguments],
        (SHAPE.value_heads * 128 // STATE_ROWS // (SCAN_THREADS // 32), len(segments)),
        (SCAN_THREADS,),
    )
    device.threads(
        f"delta_finish_{suffix}",
        [mixed, z, norm, qkv, *its, out, arguments],
        (SHAPE.value_heads * 32, first + len(segments)),
        (96,),
    )
    return np.split(out, np.cumsum([len(inputs) for inputs, _, _ in segments])[:-1])


def rounded(name: str, inputs: Inputs) -> Inputs:
    """As the kernel is given them."""
    number = FORMATS[name]
    return Inputs(*(number.decode(number.encode(x)) for x in inputs.arrays))


def near(got: Floats, want: Floats, rounding: float) -> bool:
    return bool(np.abs(got - want).max() <= rounding * np.abs(want).max())


@pytest.mark.small
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_states_are_those_of_float64(device: Device, name: str, kind: str) -> None:
    slots, inputs, begun = Slots(name), LAYER.inputs(6), LAYER.state()
    slots.put(0, begun)
    before = slots.bits(0)
    segments: list[Segment] = [(inputs, None, [(6, 1)]), (inputs, 0, [(2, 2), (6, 3)])]
    new, later = run(device, slots, segments, kind)
    exact, read = rounded(name, inputs), slots.state(0)
    assert slots.bits(0) == before, "what is only read stays"
    for got, state, slot in ((new, LAYER.zeros(), 1), (later, read, 3)):
        want, behind = LAYER.expected(exact, state)
        assert near(slots.number.decode(got), want, ROUNDING[name])
        assert near(slots.state(slot).matrices, behind.matrices, ROUNDING["float"])
        assert np.array_equal(slots.state(slot).tail, behind.tail)
    _, on_the_way = LAYER.expected(exact.part(0, 2), read)
    assert near(slots.state(2).matrices, on_the_way.matrices, ROUNDING["float"])
    assert np.array_equal(slots.state(2).tail, on_the_way.tail)


TOKENS = 40
# Where a sequence is cut into steps.
CUTS = {
    "token by token": range(1, TOKENS + 1),
    "whole": (TOKENS,),
    "an answer behind its prompt": (37, 38, 40),
    "longer and longer": (1, 16, TOKENS),
    "the other way round": (31, 33, TOKENS),
}


@pytest.mark.small
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_no_bit_depends_on_how_tokens_are_cut_or_on_company(
    device: Device, name: str, cut: str
) -> None:
    """In one slot, or on to another; with company; with writes on the way, and rows behind them."""
    inputs, begun, other = LAYER.inputs(TOKENS), LAYER.state(), LAYER.inputs(19, seed=9)
    slots, made, first, slot = Slots(name), list[Stored](), 0, 0
    slots.put(0, begun)
    for number, end in enumerate(CUTS[cut]):
        kind, drafts = KINDS[number % 2], min(end + number % 4, TOKENS)
        to = slot if number % 3 else 1 - slot
        count = end - first
        writes = [(count // 2, 2)] * (count > 1) + [(count, to)]
        segments: list[Segment] = [(inputs.part(first, drafts), slot, writes)]
        if number % 2:
            segments = [(other.part(0, 3), None, [(3, 3)]), *segments, (other, None, [(7, 4)])]
        device.set_order(number)
        out = run(device, slots, segments, kind)
        device.set_order(0)
        made.append(out[number % 2][:count])
        first, slot = end, to
    whole = Slots(name)
    whole.put(0, begun)
    (want,) = run(device, whole, [(inputs, 0, [(TOKENS, 0)])], "dense")
    assert np.array_equal(np.concatenate(made), want)
    assert slots.bits(slot) == whole.bits(0)
    assert slots.bits(5) == whole.bits(5), "nothing is written beside the slots"


@pytest.mark.small
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_behind_the_last_write_are_computed_and_leave_the_state(
    device: Device, name: str, kind: str
) -> None:
    inputs, begun, other = LAYER.inputs(7), LAYER.state(), LAYER.inputs(6, seed=9)
    whole, kept = Slots(name), Slots(name)
    whole.put(0, begun)
    kept.put(0, begun)
    (want,) = run(device, whole, [(inputs, 0, [(7, 0)])], kind)
    company: Segment = (other, None, [(6, 2)])
    run(device, kept, [(inputs.part(0, 4), 0, [(2, 1), (4, 0)]), company], kind)
    for order in range(4):
        slots = Slots(name)
        slots.put(0, begun)
        device.set_order(order)
        segments: list[Segment] = [(inputs, 0, [(2, 1), (4, 0)]), company]
        made, _ = run(device, slots, segments, kind)
        assert np.array_equal(made, want)
        assert slots.arena.tobytes() == kept.arena.tobytes()
    device.set_order(0)
