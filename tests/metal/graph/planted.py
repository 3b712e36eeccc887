"""Steps in flight at once, and what is found wrong with them when a call to MLX's encoder is not
made as it should be."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import mlx.core as mx

import metal_ext
from metal_ext import MetalRows
from tests.metal.graph import _standin
from tests.metal.graph.stage import KINDS, Sequence, Shape, Stage

SHAPE = Shape(kv_heads=1, query_heads=2, layers=2, kept=mx.float32)
SEEDS = range(1, 7)
WAIT_S = 0.3  # for an epoch that may never be signalled
WRITERS = ("append", "project_append")
READERS = ("decode_attention", "gather", "region_view")
EPS = 1e-6


@dataclass(frozen=True)
class Plant:
    """Calls that are not made as they should be."""

    operation: str
    call: str
    which: frozenset[int]
    how: str

    def __str__(self) -> str:
        which = ", ".join(str(n) for n in sorted(self.which))
        return f"{self.operation}: {self.call} {which}: {self.how}"


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    _standin.plant(plant.operation, plant.call, set(plant.which), plant.how)
    try:
        yield
    finally:
        _standin.plant("")
        _standin.settle()


class Program:
    """Steps that write rows in one way and read them in another, in layers that do not need each
    other; nobody waits for the first one before the last is there."""

    broken: ClassVar[list["Program"]] = []
    """Kept: what they do in the end is no other's mistake."""

    def __init__(self, kind: str, writer: str, reader: str) -> None:
        self.writer, self.reader = writer, reader
        self.stage = Stage(kind, SHAPE, timeout_s=WAIT_S)
        self.one, self.other = self.stage.open(64), self.stage.open(64)
        self.rows: list[MetalRows] = []
        self.ends: list[mx.array] = []
        self.seen: list[tuple[mx.array, mx.array]] = []  # results, and what they must be

    @property
    def parts(self) -> list[tuple[Sequence, int]]:
        return [(self.one, 1), (self.other, 4)]

    def check(self, result: mx.array, expected: mx.array) -> mx.array:
        """Another command reads the result, too."""
        self.seen.append((_standin.observed(result + 0, [result]), expected))
        return result

    def step(self) -> None:
        stage, shape = self.stage, self.stage.shape
        rows, results = stage.rows(*self.parts), []
        queries = [shape.numbers(5, shape.query_heads) for _ in range(shape.layers)]
        kept = [self.write(rows, layer) for layer in range(shape.layers)]
        tokens = self.other.tokens + 4
        for layer, (asked, (keys, values)) in enumerate(zip(queries, kept, strict=True)):
            first = 0 if self.reader == "decode_attention" else 1  # the row of the other sequence
            result = self.read(rows, layer, asked[first:], tokens)
            right = stage.expected(layer, self.parts, asked, keys, values)[first:]
            results.append(self.check(result, right))
        end = metal_ext.step_end([*results, *stage.tokens], rows, stage.substrate)
        self.ends.append(_standin.observed(end + 0, [end]))
        self.rows.append(rows)

    def write(self, rows: MetalRows, layer: int) -> tuple[mx.array, mx.array]:
        """Returns the keys and values that the layer has then."""
        stage, shape = self.stage, self.stage.shape
        keys, values = (shape.numbers(5, shape.kv_heads) for _ in "kv")
        if self.writer == "append":
            stage.append(rows, layer, keys, values)
            return keys, values
        queries = shape.numbers(5, shape.query_heads)
        ones = mx.ones((shape.head_dim,))
        # Without turning: what comes out can be said without a model.
        stage.tokens[layer], projected = metal_ext.project_append(
            stage.tokens[layer], queries, keys, values, (ones, ones, EPS), None, rows,
            stage.layers[layer], stage.substrate,
        )  # fmt: skip
        self.check(projected, mx.fast.rms_norm(queries, ones, EPS))
        return mx.fast.rms_norm(keys, ones, EPS), values

    def read(self, rows: MetalRows, layer: int, queries: mx.array, tokens: int) -> mx.array:
        stage, heads = self.stage, (SHAPE.kv_heads, SHAPE.head_dim)
        token, substrate = stage.tokens[layer], stage.substrate
        if self.reader == "decode_attention":
            return stage.decode(rows, layer, 0, queries)
        if self.reader == "gather":
            at = stage.layers[layer]
            past = [*metal_ext.gather(token, rows, 1, tokens, at, *heads, substrate)]
        else:
            past = [
                metal_ext.region_view(
                    token, self.other.range, region, tokens, *heads, SHAPE.kept, substrate
                )
                for region in (2 * layer, 2 * layer + 1)
            ]
        return stage.chunk(queries, past[0], past[1])

    def run(self) -> list[str]:
        """What is found wrong."""
        # A command of somebody's, in flight, that no step waits for.
        mx.eval(_standin.observed(mx.zeros((1,)) + 0, []))
        _standin.hand_over()
        for _ in range(2):
            self.step()
        mx.eval(self.ends, [result for result, _ in self.seen])
        found = _standin.take_mistakes()
        for result, expected in self.seen:
            self.stage.measure(result, expected)
        if self.stage.worst > 1.0:
            found.append("a result is wrong")
        if [end.item() for end in self.ends] != [rows.epoch for rows in self.rows]:
            found.append("the end of a step has not run")
        if self.stage.substrate.completed_epoch != self.rows[-1].epoch:
            found.append("an epoch was never signalled")
        if not self.stage.substrate.shutdown():
            found.append("the substrate cannot be shut down")
            self.broken.append(self)
        return found + _standin.take_mistakes()


def programs() -> list[tuple[str, str, str]]:
    """Kind, writer, reader."""
    every = product(KINDS, WRITERS, READERS)
    return [(k, w, r) for k, w, r in every if (k, r) != ("paged", "region_view")]


def found_with(plant: Plant) -> list[str]:
    """What shows in the first program and with the first seed in which something does."""
    for seed, (kind, writer, reader) in product(SEEDS, programs()):
        if plant.operation in (writer, reader, "step_end", "*"):
            _standin.seed(seed)
            program = Program(kind, writer, reader)
            with planted(plant):
                found = program.run()
            if found:
                return [f"{kind}: {words}" for words in found]
    return []


def plants() -> list[Plant]:
    """Every call that operations make, dropped or bent.

    Three are left out. That an operation names the queue: the next one does so too, so that all are
    dropped at once. That a step's end names its arrays one by one: its encoder waits for all others
    anyhow. That an output is written, of two that the same command reads: one of them is enough.
    """
    found = [Plant("*", "commandQueue", frozenset({0}), "drop")]
    for operation in (*WRITERS, *READERS, "step_end"):
        writer = operation if operation in WRITERS else WRITERS[0]
        reader = operation if operation in READERS else READERS[0]
        assert Program("sparse", writer, reader).run() == []
        calls = _standin.calls(operation)
        for name in sorted(set(calls)):
            if name == "commandQueue" or (operation, name) == ("step_end", "set_input_array"):
                continue
            one_by_one = [frozenset({n}) for n in range(calls.count(name))]
            found += [Plant(operation, name, which, "drop") for which in one_by_one]
            if name == "set_output_array":
                pair = {"decode_attention": {0, 1}, "gather": {0, 1}}.get(operation)
                bent = [which for which in one_by_one if pair is None or not which <= pair]
                bent += [frozenset(pair)] if pair else []
                found += [Plant(operation, name, which, "input") for which in bent]
            if name == "end_encoding":
                found.append(Plant(operation, name, frozenset({0}), "no wait"))
        if operation in WRITERS:  # the token, and the buffers, which have been written before
            for which in ({0}, {1, 2}):
                plant = Plant(operation, "set_output_array", frozenset(which), "register")
                found.append(plant)
    return found
