"""Steps in flight at once, and what is found wrong with them when a call to MLX's encoder is not
made as it should be."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import mlx.core as mx

import metal_ext
from metal_ext import MetalRows
from tests.metal.graph import _standin
from tests.metal.graph.stage import KINDS, Sequence, Shape, Stage

SHAPE = Shape(kv_heads=1, query_heads=2, layers=2, kept=mx.float32)
SEEDS = range(1, 7)
WAIT_S = 1.0  # for an epoch that may never be signalled
WRITERS = ("append", "project_append")
READERS = ("decode_attention", "gather", "region_view")
EPS = 1e-6
LONG = 300  # tokens that are read in several splits
# Outputs of which one is enough: the next command uses all of them, or writes the same.
TOGETHER = {
    "decode_attention": frozenset({0, 1, 2}),
    "gather": frozenset({0, 1}),
}
# Operations that do more where programs are uneven, and what of it is planted there.
UNEVEN = {
    "decode_attention": (),
    "append": ("ordered_copy", "add_temporary"),
    "project_append": ("ordered_copy", "add_temporary"),
}


@dataclass(frozen=True)
class Plant:
    """Calls that are not made as they should be."""

    operation: str
    call: str
    which: frozenset[int]
    how: str
    uneven: bool = False
    """In such programs alone."""

    def __str__(self) -> str:
        which = ", ".join(str(n) for n in sorted(self.which))
        uneven = " (uneven)" if self.uneven else ""
        return f"{self.operation}{uneven}: {self.call} {which}: {self.how}"


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

    def __init__(self, kind: str, writer: str, reader: str, uneven: bool = False) -> None:
        """uneven: one sequence is long, and arrays have gaps."""
        self.writer, self.reader, self.uneven = writer, reader, uneven
        self.stage = Stage(kind, SHAPE, timeout_s=WAIT_S)
        self.one, self.other = self.stage.open(LONG + 64 if uneven else 64), self.stage.open(64)
        if uneven:
            self.stage.step((self.one, LONG))
        self.rows: list[MetalRows] = []
        self.ends: list[mx.array] = []
        self.seen: list[tuple[mx.array, mx.array]] = []  # results, and what they must be

    @property
    def parts(self) -> list[tuple[Sequence, int]]:
        """Of the next step: what is decoded in one is a chunk of the next."""
        one, other = (self.other, self.one) if self.rows else (self.one, self.other)
        return [(one, 1), (other, 4)]

    def numbers(self, heads: int) -> mx.array:
        numbers = self.stage.shape.numbers(5, heads)
        return mx.repeat(numbers, 2, axis=-1)[..., ::2] if self.uneven else numbers

    def check(self, result: mx.array, expected: mx.array) -> mx.array:
        """Another command reads the result, too."""
        self.seen.append((_standin.observed(result + 0, [result]), expected))
        return result

    def step(self) -> None:
        stage, shape, parts = self.stage, self.stage.shape, self.parts
        rows, results = stage.rows(*parts), []
        queries = [self.numbers(shape.query_heads) for _ in range(shape.layers)]
        kept = [self.write(rows, layer) for layer in range(shape.layers)]
        chunk = parts[1][0]
        tokens = chunk.tokens + 4
        for layer, (asked, (keys, values)) in enumerate(zip(queries, kept, strict=True)):
            first = 0 if self.reader == "decode_attention" else 1  # row of the chunk
            result = self.read(rows, layer, asked[first:], chunk, tokens)
            right = stage.expected(layer, parts, asked, keys, values)[first:]
            results.append(self.check(result, right))
            if self.uneven:  # what reads a result comes right behind what has made it
                mx.eval(self.seen[-1][0])
        end = metal_ext.step_end([*results, *stage.tokens], rows, stage.kv_backend)
        self.ends.append(_standin.observed(end + 0, [end]))
        self.rows.append(rows)

    def write(self, rows: MetalRows, layer: int) -> tuple[mx.array, mx.array]:
        """Returns the keys and values that the layer has then."""
        stage, shape = self.stage, self.stage.shape
        keys, values = (self.numbers(shape.kv_heads) for _ in "kv")
        if self.writer == "append":
            stage.append(rows, layer, keys, values)
            return keys, values
        queries = self.numbers(shape.query_heads)
        ones = mx.ones((shape.head_dim,))
        # Without turning: what comes out can be said without a model.
        stage.tokens[layer], projected = metal_ext.project_append(
            stage.tokens[layer], queries, keys, values, (ones, ones, EPS), None, rows,
            stage.layers[layer], stage.kv_backend,
        )  # fmt: skip
        self.check(projected, mx.fast.rms_norm(queries, ones, EPS))
        return mx.fast.rms_norm(keys, ones, EPS), values

    def read(
        self, rows: MetalRows, layer: int, queries: mx.array, chunk: Sequence, tokens: int
    ) -> mx.array:
        stage, heads = self.stage, (SHAPE.kv_heads, SHAPE.head_dim)
        token, kv_backend = stage.tokens[layer], stage.kv_backend
        if self.reader == "decode_attention":
            return stage.decode(rows, layer, 0, queries)
        if self.reader == "gather":
            at = stage.layers[layer]
            past = [*metal_ext.gather(token, rows, 1, 0, tokens, at, *heads, kv_backend)]
        else:
            past = [
                metal_ext.region_view(
                    token, chunk.range, region, tokens, *heads, SHAPE.kept, kv_backend
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
        if self.stage.kv_backend.completed_epoch != self.rows[-1].epoch:
            found.append("an epoch was never signalled")
        if not self.stage.kv_backend.shutdown():
            found.append("the backend cannot be shut down")
            self.broken.append(self)
        return found + _standin.take_mistakes()


def programs() -> list[tuple[str, str, str, bool]]:
    """Kind, writer, reader, and whether it is uneven."""
    every = product(KINDS, WRITERS, READERS, (False, True))
    absent = ("paged", "region_view")
    return [
        (k, w, r, uneven)
        for k, w, r, uneven in every
        if (k, r) != absent and not (uneven and r not in UNEVEN)
    ]


def found_with(plant: Plant) -> list[str]:
    """What shows in the first program and with the first seed in which something does."""
    for seed, (kind, writer, reader, uneven) in product(SEEDS, programs()):
        if uneven == plant.uneven and plant.operation in (writer, reader, "step_end", "*"):
            _standin.seed(seed)
            program = Program(kind, writer, reader, uneven)
            with planted(plant):
                found = program.run()
            if found:
                return [f"{kind}: {words}" for words in found]
    return []


def plants() -> list[Plant]:
    """Every call that operations make, dropped or bent.

    Three are left out. That an operation names the queue: the next one does so too, so that all are
    dropped at once. That a step's end names its arrays one by one: its encoder waits for all others
    anyhow. That an output is written, of several that the next command uses: one is enough, or none
    where that command writes one of them, too.
    """
    found = [Plant("*", "commandQueue", frozenset({0}), "drop")]
    for operation in (*WRITERS, *READERS, "step_end"):
        found += plants_of(operation, calls_of(operation))
        if operation in WRITERS:  # the token, and the buffers, which have been written before
            for which in (0, 1):
                plant = Plant(operation, "set_output_array", frozenset({which}), "register")
                found.append(plant)
    for operation, names in UNEVEN.items():
        calls = [name for name in calls_of(operation, uneven=True) if not names or name in names]
        found += [replace(plant, uneven=True) for plant in plants_of(operation, calls)]
    return found


def calls_of(operation: str, *, uneven: bool = False) -> list[str]:
    """Those that it makes where nothing is wrong."""
    writer = operation if operation in WRITERS else WRITERS[0]
    reader = operation if operation in READERS else READERS[0]
    assert Program("sparse", writer, reader, uneven).run() == []
    return _standin.calls(operation)


def plants_of(operation: str, calls: list[str]) -> list[Plant]:
    """These calls of an operation, dropped or bent."""
    found = []
    for name in sorted(set(calls)):
        if name == "commandQueue" or (operation, name) == ("step_end", "set_input_array"):
            continue
        one_by_one = [frozenset({n}) for n in range(calls.count(name))]
        found += [Plant(operation, name, which, "drop") for which in one_by_one]
        if name == "set_output_array":
            together = TOGETHER.get(operation, frozenset())
            bent = [which for which in one_by_one if not which <= together]
            # Those behind them write the same again.
            behind = range(max(together, default=calls.count(name)) + 1, calls.count(name))
            bent += [together.union(behind)] if together else []
            found += [Plant(operation, name, which, "input") for which in bent]
        if name == "end_encoding":
            found.append(Plant(operation, name, frozenset({0}), "no wait"))
    return found
