"""States of recurrent layers in slots of a device, on each kind of backend, against the CPU's."""

from collections.abc import Callable, Sequence
from random import Random

import mlx.core as mx
import numpy as np
import pytest

import metal_ext
from metal_ext import CpuWorkers, MetalStateRows
from tests.metal.graph import _standin
from tests.metal.graph.stage import KINDS, Stage
from tests.metal_ext.deltas import DeltaLayer, DeltaShape, Inputs, Slots, run
from tests.metal_ext.layers import Floats

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
SHAPE = DeltaShape(key_heads=1, value_heads=2, key_dim=128, value_dim=128)
LAYER = DeltaLayer(SHAPE)
OFFSET = 256
NUM_SLOTS = 8
# Of the largest number: float32 over some tokens; else some units in the last place.
ROUNDING = {mx.float32: 2e-5, mx.float16: 2.0**-9, mx.bfloat16: 2.0**-6}
WORKERS = CpuWorkers(1)
Segment = tuple[Inputs, int | None, list[tuple[int, int]]]


class Device:
    """Slots of one layer on a stage, and steps over them."""

    def __init__(self, kind: str, dtype: mx.Dtype = mx.float32, sequences: int = 3) -> None:
        self.stage, self.dtype = Stage(kind, heaps=sequences), dtype
        self.ranges = [self.stage.open(1) for _ in range(sequences)]
        self.slot_bytes = -(-(OFFSET + 4 * SHAPE.numbers) // 256) * 256
        self.stage.kv_backend.make_slots(NUM_SLOTS, self.slot_bytes)
        for slot in range(NUM_SLOTS):
            assert self.stage.kv_backend.commit_slot(slot) <= NUM_SLOTS * self.slot_bytes
        self.token = mx.zeros((1,))

    def begin(self, segments: Sequence[Segment]) -> tuple[metal_ext.MetalRows, MetalStateRows]:
        """A step of these, whose rows of K and V are nobody's business."""
        rows = self.stage.rows(*((self.ranges[n], len(its[0])) for n, its in enumerate(segments)))
        slots = [(len(its), read, writes) for its, read, writes in segments]
        return rows, self.stage.kv_backend.state_rows(rows, slots)

    def given(self, segments: Sequence[Segment]) -> list[mx.array]:
        joined = (np.concatenate([its.arrays[i] for its, _, _ in segments]) for i in range(4))
        return [mx.array(x).astype(self.dtype) for x in joined]

    def step(self, *segments: Segment) -> list[Floats]:
        """What comes out of each segment, when the step has run."""
        rows, states = self.begin(segments)
        qkv, z, a, b = self.given(segments)
        self.token, made = metal_ext.gated_delta(
            self.token, qkv, z, a, b, LAYER.native, states, OFFSET, self.stage.kv_backend
        )
        mx.eval(metal_ext.step_end([made, self.token], rows, self.stage.kv_backend), made)
        ends = np.cumsum([len(its) for its, _, _ in segments])[:-1]
        return np.split(np.array(made.astype(mx.float32)), ends)


def near(got: Floats, want: Floats, dtype: mx.Dtype) -> bool:
    return bool(np.abs(got - want).max() <= ROUNDING[dtype] * np.abs(want).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_of_ragged_rows_are_the_cpus(kind: str, dtype: mx.Dtype) -> None:
    device, slots = Device(kind, dtype), Slots(SHAPE)
    one, other, third = (LAYER.inputs(12, seed) for seed in (5, 6, 7))
    long = LAYER.inputs(40, 8)
    plan: list[list[Segment]] = [
        [(one.part(0, 5), None, [(2, 0), (5, 1)]), (other.part(0, 1), None, [(1, 2)])],
        [(one.part(5, 6), 1, [(1, 1)]), (other.part(1, 2), 2, [(1, 2)]), (third, None, [(12, 3)])],
        # From the boundary on the way: what others have is only read.
        [(third.part(0, 4), 0, [(1, 4), (3, 5), (4, 6)]), (one.part(6, 9), 1, [(2, 7), (3, 1)])],
        [(one.part(9, 10), 0, [(1, 3)]), (other, 4, [(12, 4)]), (third.part(4, 5), 5, [(1, 5)])],
        # A step with drafts, then one that repeats the kept drafts before its own rows.
        [(third.part(5, 12), 5, [(1, 5)]), (one.part(10, 12), 3, [(1, 3)])],
        [(one.part(11, 12), 3, [(1, 3)]), (third.part(6, 12), 5, [(2, 1), (4, 5)])],
        # A prompt, which what others decode comes with; then it goes on.
        [(one.part(0, 2), 3, [(2, 3)]), (long.part(0, 31), None, [(16, 0), (31, 2)])],
        [(long.part(31, 34), 2, [(3, 2)]), (long.part(16, 40), 0, [(5, 6), (22, 7)])],
    ]
    for segments in plan:
        given = [(rounded(its, dtype), read, writes) for its, read, writes in segments]
        right = run(LAYER, slots, given, WORKERS)
        for got, want in zip(device.step(*segments), right, strict=True):
            assert near(got, want, dtype)
    device.stage.end()


def rounded(inputs: Inputs, dtype: mx.Dtype) -> Inputs:
    arrays = (mx.array(x).astype(dtype).astype(mx.float32) for x in inputs.arrays)
    return Inputs(*(np.array(x) for x in arrays))


@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_depends_on_how_tokens_are_cut_or_on_company(kind: str) -> None:
    inputs, company = LAYER.inputs(40), LAYER.inputs(3, seed=9)
    (whole,) = Device(kind).step((inputs, None, [(40, 0)]))
    device, cut = Device(kind), list[Floats]()
    for first, end in ((0, 1), (1, 16), (16, 32), (32, 34), (34, 40)):
        read = 0 if first else None
        own: Segment = (inputs.part(first, end), read, [(end - first, 0)])
        cut.append(device.step((company, None, [(3, 1 + first % 7)]), own)[-1])
    assert np.array_equal(np.concatenate(cut), whole)
    device.stage.end()


class Life:
    """Sequences that advance, keep states, give way, and go on from states that anybody kept; the
    CPU's kernel does the same."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng, self.device, self.slots = Random(seed), Device(kind), Slots(SHAPE)
        self.texts = [LAYER.inputs(60, 10 * seed + n) for n in range(3)]
        # Of each sequence: whose text it computes, from which token, and where its state is.
        self.running: list[tuple[int, int, int | None]] = [(n, 0, None) for n in range(3)]
        self.kept: dict[int, tuple[int, int]] = {}
        self.keeping: dict[int, tuple[int, int]] = {}  # written by the step that is being made
        self.read: set[int] = set()
        self.resumed = 0

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.read.clear()
            segments = [self.advance(number) for number in range(len(self.running))]
            right = run(LAYER, self.slots, segments, WORKERS)
            for got, want in zip(self.device.step(*segments), right, strict=True):
                assert near(got, want, mx.float32)
            self.kept |= self.keeping
            self.keeping.clear()
        self.device.stage.end()

    def advance(self, number: int) -> Segment:
        text, first, slot = self.running[number]
        if self.rng.random() < 0.2 or first == len(self.texts[text]):
            text, first, slot = self.chosen()
            if slot is not None:
                self.read.add(slot)
                self.resumed += 1
        inputs = self.texts[text].part(first, first + self.rng.choice((1, 1, 2, 3, 4, 17)))
        writes = [(len(inputs), self.free() if slot is None or slot in self.kept else slot)]
        self.running[number] = (text, first + len(inputs), writes[0][1])
        if len(inputs) > 1 and self.rng.random() < 0.3:
            kept = self.free()
            writes.insert(0, (1, kept))
            self.keeping[kept] = (text, first + 1)
        return inputs, slot, writes

    def chosen(self) -> tuple[int, int, int | None]:
        """Where somebody goes on who has given way: at the beginning, or at what was kept."""
        if not self.kept or self.rng.random() < 0.2:
            return self.rng.randrange(len(self.texts)), 0, None
        slot = self.rng.choice(list(self.kept))
        return *self.kept[slot], slot

    def free(self) -> int:
        """An unused slot; of those in use, the oldest goes first."""
        needed = {*self.read, *self.keeping, *(slot for _, _, slot in self.running)}
        while not (free := [n for n in range(NUM_SLOTS) if n not in needed and n not in self.kept]):
            del self.kept[next(its for its in self.kept if its not in needed)]
        return self.rng.choice(free)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_random_lives_are_the_cpus(kind: str, seed: int) -> None:
    life = Life(kind, seed)
    life.live(steps=30)
    assert life.resumed


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_begins_sees_nothing_of_what_its_slot_held(kind: str) -> None:
    device, inputs = Device(kind), LAYER.inputs(4)
    nothing = Inputs(*(np.full_like(x, np.nan) for x in inputs.arrays))
    (fresh,) = device.step((inputs, None, [(4, 0)]))
    assert np.isnan(device.step((nothing, None, [(4, 1)]))[0]).all()
    assert np.array_equal(device.step((inputs, None, [(2, 2), (4, 1)]))[0], fresh)
    device.stage.end()


@pytest.mark.parametrize("longest", [2, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_three_commands_and_names_no_buffer_of_slots_but_the_arena(
    kind: str, longest: int
) -> None:
    device, inputs = Device(kind), LAYER.inputs(longest)
    before = _standin.counts()["commands"]
    device.step((inputs.part(0, 2), None, [(1, 0), (2, 1)]), (inputs, None, [(longest, 2)]))
    assert _standin.counts()["commands"] - before == 3 + len(["step_end"])
    calls = _standin.calls("gated_delta")
    assert calls.count("set_output_array") == 6 + 3 * (kind == "dense")
    assert calls.count("ordered_copy") == 0
    device.stage.end()


class Step:
    """A step of two rows over a device with two states."""

    def __init__(self) -> None:
        self.device, self.inputs = Device("sparse"), LAYER.inputs(2)
        self.device.step((self.inputs, None, [(1, 0), (2, 1)]))
        segment: Segment = (self.inputs, 0, [(2, 2)])
        self.rows, self.states = self.device.begin([segment])
        self.given = self.device.given([segment])

    def slots(self, *segments: tuple[int, int | None, list[tuple[int, int]]]) -> object:
        return self.device.stage.kv_backend.state_rows(self.rows, list(segments))

    def call(self, **changes: object) -> tuple[mx.array, mx.array]:
        names = ("qkv", "z", "a", "b")
        arguments = {
            "token": self.device.token, "delta": LAYER.native, "rows": self.states,
            "offset": OFFSET, "workers": self.device.stage.kv_backend,
        } | dict(zip(names, self.given, strict=True))  # fmt: skip
        result: tuple[mx.array, mx.array]
        result = metal_ext.gated_delta(**(arguments | changes))  # type: ignore[call-overload]
        return result


SMALL = DeltaLayer(DeltaShape(key_heads=1, value_heads=2, key_dim=64, value_dim=192))
WRONG: dict[str, tuple[Callable[[Step], object], type[Exception], str]] = {
    "rows of an array": (lambda s: s.call(a=mx.zeros((3, 2))), ValueError, r"a must be \[2, 2\]"),
    "a width": (lambda s: s.call(z=mx.zeros((2, 128))), ValueError, r"z must be \[2, 256\]"),
    "two types": (lambda s: s.call(b=s.given[3].astype(mx.float16)), ValueError,
                  "qkv and b have different types"),
    "integers": (lambda s: s.call(**{n: mx.zeros(x.shape, mx.int32) for n, x in
                                     zip(("qkv", "z", "a", "b"), s.given, strict=True)}),
                 ValueError, "qkv must be float32, float16 or bfloat16"),
    "dimensions": (lambda s: s.call(delta=SMALL.native, qkv=mx.zeros((2, 512)),
                                    z=mx.zeros((2, 384))), ValueError, "built for 128"),
    "an offset": (lambda s: s.call(offset=3 * OFFSET), IndexError, "bytes of a slot"),
    "half a number": (lambda s: s.call(offset=2), ValueError, "a multiple of 4"),
    "a part of a vector": (lambda s: s.call(offset=4), ValueError, "a multiple of 16"),
    "another backend": (lambda s: s.call(workers=Stage("paged").kv_backend), ValueError,
                          "the rows are of another backend"),
    "the CPU's workers": (lambda s: s.call(workers=WORKERS), TypeError, "incompatible"),
    "a slot that is not there": (lambda s: s.slots((2, NUM_SLOTS, [(2, 3)])), IndexError,
                                 "slot 8 of 8"),
    "a negative slot": (lambda s: s.slots((2, 0, [(2, -1)])), IndexError, "slot is -1"),
    "no rows": (lambda s: s.slots((0, 0, [(0, 3)])), IndexError, "count is 0"),
    "rows of the segments": (lambda s: s.call(rows=s.slots((3, 0, [(3, 3)]))), ValueError,
                             r"qkv must be \[3, 512\]"),
    "no write": (lambda s: s.slots((2, 0, [])), ValueError, "a segment needs a write"),
    "a state that nothing has written": (lambda s: s.slots((2, 3, [(2, 4)])), RuntimeError,
                                         "nothing has written it"),
    "a slot of a step in flight": (lambda s: s.slots((2, None, [(2, 2)])), RuntimeError,
                                   "while epoch 2 may touch it"),
    "memory of no slot": (lambda s: s.device.stage.kv_backend.commit_slot(NUM_SLOTS), IndexError,
                          "slot 8 of 8"),
    "memory of a negative slot": (lambda s: s.device.stage.kv_backend.commit_slot(-1), IndexError,
                                  "slot is -1"),
    "slots twice": (lambda s: s.device.stage.kv_backend.make_slots(1, 256), RuntimeError,
                    "has slots already"),
    "no slots": (lambda s: Stage("paged").kv_backend.make_slots(0, 256), IndexError, "count is 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_by_name(case: str) -> None:
    call, error, words = WRONG[case]
    made = Step()
    with pytest.raises(error, match=words):
        call(made)
    made.device.stage.kv_backend.abandon(made.rows)
    made.device.stage.end()


def test_without_slots_there_are_no_states() -> None:
    stage = Stage("sparse")
    rows = stage.rows((stage.open(1), 1))
    with pytest.raises(ValueError, match="the backend has no slots"):
        stage.kv_backend.state_rows(rows, [(1, None, [(1, 0)])])
    stage.kv_backend.abandon(rows)
    stage.end()


def test_after_its_end_a_step_advances_no_state() -> None:
    made = Step()
    kv_backend = made.device.stage.kv_backend
    late, _ = made.call()
    mx.eval(metal_ext.step_end([made.device.token], made.rows, kv_backend))
    with pytest.raises(RuntimeError, match="gated_delta runs after the end of its step, epoch 2"):
        mx.eval(late)
    with pytest.raises(RuntimeError, match="gated_delta of epoch 2, which has ended"):
        made.call()
    with pytest.raises(RuntimeError, match="state_rows of epoch 2, which has ended"):
        made.slots((2, 0, [(2, 3)]))
    made.device.stage.end()
