"""Steps that advance states of recurrent layers, and what is found wrong with them when a call to
MLX's encoder is not made as it should be."""

from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np

import metal_ext
from tests.metal.graph import _standin
from tests.metal.graph.planted import SEEDS, Plant, Program, planted, plants_of
from tests.metal.graph.stage import KINDS, Sequence
from tests.metal_ext.deltas import DeltaLayer, DeltaShape, Inputs, State

OPERATION = "gated_delta"
SHAPE = DeltaShape(key_heads=1, value_heads=2, key_dim=128, value_dim=128)
OFFSETS = (64, 64 + 4 * SHAPE.numbers)
"""Of each layer, in a slot."""
SLOT_BYTES = 1 << 19
NUM_SLOTS = 12
SCAN_OUTPUTS = [frozenset(which) for which in ({0, 4}, {1, 2, 3}, {3}, {5})]
"""Of the three commands: the token's; the arrays between them; y; the result."""
Segment = tuple[int, int | None, list[tuple[int, int]]]
"""Of ``state_rows``."""


class StateProgram(Program):
    """Two steps of two sequences, in layers that do not need each other, over states that go on in
    the slot that is read, come to one of their own on the way, or begin."""

    def __init__(self, kind: str, uneven: bool = False) -> None:
        """uneven: arrays have gaps."""
        super().__init__(kind, "append", "decode_attention")
        self.gaps = uneven
        self.stage.kv_backend.make_slots(NUM_SLOTS, SLOT_BYTES)
        for slot in range(NUM_SLOTS):
            self.stage.kv_backend.commit_slot(slot)
        self.layers = [DeltaLayer(SHAPE, seed) for seed in (3, 4)]
        self.states: dict[tuple[int, Sequence], State] = {}
        self.state_tokens = [mx.zeros((1,)) for _ in self.layers]
        self.working: dict[Sequence, int] = {}
        self.free = list(range(NUM_SLOTS))

    def segment(self, sequence: Sequence, count: int) -> Segment:
        """Of the next rows: the first half of several is written to a slot of its own, too."""
        read = self.working.get(sequence)
        self.working[sequence] = self.free.pop() if read is None else read
        halves = [(count // 2, self.free.pop())] if count > 1 else []
        return count, read, [*halves, (count, self.working[sequence])]

    def step(self) -> None:
        stage, parts, results = self.stage, self.parts, []
        rows = stage.rows(*parts)
        states = stage.kv_backend.state_rows(rows, [self.segment(*part) for part in parts])
        for number, layer in enumerate(self.layers):
            inputs = self.inputs(len(rows), number)
            qkv, z, a, b = self.arrays(inputs)
            self.state_tokens[number], made = metal_ext.gated_delta(
                self.state_tokens[number], qkv, z, a, b, layer.native, states,
                OFFSETS[number], stage.kv_backend,
            )  # fmt: skip
            results.append(self.check(made, self.expected_rows(number, inputs)))
            if self.gaps:
                mx.eval(self.seen[-1][0])
        end = metal_ext.step_end([*results, *self.state_tokens], rows, stage.kv_backend)
        self.ends.append(_standin.observed(end + 0, [end]))
        self.rows.append(rows)

    def inputs(self, rows: int, number: int) -> Inputs:
        its = self.layers[number].inputs(rows, seed=10 * len(self.rows) + number)
        return replace(its, z=(0.2 * its.z).astype(np.float32))  # so that results are below 1

    def arrays(self, inputs: Inputs) -> list[mx.array]:
        arrays = [mx.array(x) for x in inputs.arrays]
        return [mx.repeat(x, 2, axis=-1)[:, ::2] for x in arrays] if self.gaps else arrays

    def expected_rows(self, number: int, inputs: Inputs) -> mx.array:
        """What comes out; from then on the sequences have those states."""
        out, first = [], 0
        for sequence, count in self.parts:
            begun = self.states.get((number, sequence), self.layers[number].zeros())
            its = inputs.part(first, first + count)
            made, self.states[number, sequence] = self.layers[number].expected(its, begun)
            out.append(made)
            first += count
        return mx.array(np.concatenate(out).astype(np.float32))


def programs() -> list[tuple[str, bool]]:
    """Kind, and whether arrays have gaps."""
    return list(product(KINDS, (False, True)))


def found_with(plant: Plant) -> list[str]:
    """What shows in the first program and with the first seed in which something does."""
    for seed, (kind, uneven) in product(SEEDS, programs()):
        if uneven == plant.uneven:
            _standin.seed(seed)
            program = StateProgram(kind, uneven)
            with planted(plant):
                found = program.run()
            if found:
                return [f"{kind}: {words}" for words in found]
    return []


def plants() -> list[Plant]:
    """Every call that the operation makes, dropped or bent; see ``planted.plants``. Left out: that
    the first of three commands follows who wrote the token. The last says so, too."""
    own = [
        *(plant for plant in plants_of(OPERATION, calls()) if plant.how == "drop"),
        *(Plant(OPERATION, "set_output_array", which, "input") for which in SCAN_OUTPUTS),
    ]
    own.remove(Plant(OPERATION, "set_output_array", frozenset({0}), "drop"))
    copies = [name for name in calls(uneven=True) if name in ("ordered_copy", "add_temporary")]
    return [
        *own,
        *(replace(plant, uneven=True) for plant in plants_of(OPERATION, copies)),
    ]


def calls(*, uneven: bool = False) -> list[str]:
    """Those that it makes where nothing is wrong."""
    assert StateProgram("sparse", uneven).run() == []
    return _standin.calls(OPERATION)
