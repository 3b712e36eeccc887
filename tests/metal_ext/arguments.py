"""Every argument of the native functions that is an integer or an array, and a program that calls
all of them with what they must refuse or bear."""

import ast
import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import mlx.core as mx

import metal_ext
from metal_ext import (
    CopyCounter,
    CpuWorkers,
    GatedDelta,
    Geometry,
    Heap,
    Layer,
    Mapper,
    PackedExperts,
    PackedLinear,
    RopeTable,
    RowTable,
    Softmax,
    StateMemory,
    StateRows,
    append,
    block_copy,
    choose_tokens,
    chunk_attention,
    decode_attention,
    gated_delta,
    gated_mlp,
    linear,
    linear_heads,
    mixture_mlp,
    packed_bytes,
    packed_rows,
    project_append,
    region_view,
    rms_norm,
    rope_angles,
    uncounted,
)
from tests.metal_ext.deltas import DeltaLayer, DeltaShape, Slots
from tests.metal_ext.shapes import PAGE, Shape

STUB = Path(metal_ext.__file__).with_name("_ext.pyi")
# Of the stub: what only a build with Metal has; functions that take none of these types by name.
METAL_TYPES = {"MetalRows", "MetalKVBackend", "Mixture", "StoredMatrix"}
METAL_FUNCTIONS = {"mixture", "multiply", "multiply_gated"}

# Rows of two heads of 32 float32.
SHAPE = Shape(tokens_per_block=PAGE // 256, rows=(256, 256))
MAPPED_BLOCKS = 4
MAPPED_TOKENS = MAPPED_BLOCKS * SHAPE.tokens_per_block
BLOCKS = SHAPE.blocks_per_range
OUTPUTS, INPUTS, VOCABULARY, EXPERTS = 64, 32, 100, 3
DELTA = DeltaLayer(DeltaShape(key_heads=1, value_heads=2, key_dim=16))
# The bytes of a block, as a file has them.
RECORD_BYTES = len(SHAPE.rows) * PAGE
SLOT_BYTES = 4 * DELTA.shape.numbers
# Which functions look at what a layer was made with.
LAYERED, REGIONS = ("append", "decode_attention", "project_append"), ("key_region", "value_region")
Call = tuple[Callable[..., object], dict[str, Any]]

BEYOND = [-1, -(2**63), -(2**63) - 1, -(10**40)]
BEYOND += [2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**40]
HOSTILE = [0, 2**31 - 1, 2**32 + 64, *BEYOND]

# A process of so many addresses is refused what is absurd, instead of getting it.
MOST_ADDRESS_BYTES = 8 * 2**30
MOST_ACTIVE_BYTES = 2**30
MOST_NUMBERS = 2**24
REFUSED = (IndexError, ValueError, TypeError, OverflowError)
# The system alone knows which descriptors are open, and which places a file may have.
ON_FILES = ("_block(fd", "_block(offset", "_record(fd", "_record(file_offset")
# What the stub documents as a RuntimeError, with numbers inside of their intervals.
BUGS = ("is not completed", "is mapped already")


@cache
def record_file() -> int:
    """Return a descriptor, open until the process ends, of a file as long as a record."""
    file, name = mkstemp()
    os.unlink(name)
    os.ftruncate(file, RECORD_BYTES)
    return file


class Setting:
    """Everything valid, so that one argument at a time can be wrong."""

    def __init__(self) -> None:
        self.heap = Heap.shared(SHAPE.geometry())
        self.range = SHAPE.mapped(MAPPED_BLOCKS, self.heap)
        self.mapper = Mapper()
        self.workers = workers = CpuWorkers(1)
        self.slots = Slots(DELTA.shape, count=1, offset=0)
        self.rows = RowTable([(self.range, 0, 2), (self.range, 2, 1)])
        self._layer = Layer(0, 1, mx.float32)
        self._weight, self._heads = mx.ones((INPUTS,)), mx.zeros((2, 2, 32))
        self._x = mx.ones((2, INPUTS))
        self._packed = PackedLinear([mx.ones((OUTPUTS, INPUTS))], workers, [])
        self.calls = self._memory_calls() | self._cache_calls() | self._weight_calls()

    def call(self, place: str, value: object) -> Any:
        """Call a function with that value in a place of its arguments."""
        name, path = place.removesuffix(")").split("(")
        function, arguments = self.calls[name]
        argument, *rest = path.split(".")
        changed = {argument: _changed(arguments[argument], rest, value)}
        if argument == "keys":  # which are as values are
            changed["values"] = value
        return function(**(arguments | changed))

    def _memory_calls(self) -> dict[str, Call]:
        block = {"heap": self.heap, "heap_block": 0, "block": 4, "count": 1, "writable": True}
        memory, slot = self.slots.memory, self.slots.address(0)
        place = {"fd": record_file(), "offset": 0}
        record = {"offset": 0, "bytes": PAGE, "fd": place["fd"], "file_offset": 0}
        sizes = {"page_bytes": PAGE, "tokens_per_block": SHAPE.tokens_per_block}
        counts = {"blocks_per_heap": BLOCKS, "blocks_per_range": BLOCKS}
        return {
            "Geometry": (
                Geometry,
                sizes | counts | {"region_row_bytes": [256, 256], "ring_blocks": 0},
            ),
            "AddressRange.map": (self.range.map, block),
            "AddressRange.write_block": (self.range.write_block, {"block": 0} | place),
            "AddressRange.read_block": (self.range.read_block, {"block": 0} | place),
            "Mapper.map": (self.mapper.map, block | {"range": self.range}),
            "Mapper.refused": (self.mapper.refused, {"ticket": 1}),
            "Mapper.unmap": (self.mapper.unmap, {"range": self.range, "block": 0, "count": 1}),
            "Mapper.release": (self.mapper.release, {"heap": self.heap, "block": 0, "count": 1}),
            "Mapper.wait": (self.mapper.wait, {"ticket": 0, "timeout_s": 0.0}),
            "CpuWorkers": (CpuWorkers, {"threads": 1}),
            "RowTable": (RowTable, {"segments": [(self.range, 0, 1)]}),
            "StateMemory": (StateMemory, {"bytes": PAGE}),
            "StateMemory.release": (memory.release, {"offset": 0, "bytes": PAGE}),
            "StateMemory.committed": (memory.committed, {"offset": 0, "bytes": PAGE}),
            "StateMemory.write_record": (memory.write_record, record),
            "StateMemory.read_record": (memory.read_record, record),
            "StateRows": (
                StateRows,
                {"segments": [(2, 0, [(1, slot), (2, slot)])], "memories": [memory]},
            ),
        }

    def _cache_calls(self) -> dict[str, Call]:
        two, source = RowTable([(self.range, 0, 2)]), {"source": self.range, "source_block": 0}
        target = {"target": self.range, "target_block": 1, "tokens": 1, "counter": CopyCounter()}
        token, heads = {"token": mx.zeros((1,))}, self._heads
        kept = {"layer": self._layer, "workers": self.workers}
        reads = token | kept | {"rows": self.rows, "queries": heads, "kv_heads": 2}
        reads |= {"softmax": Softmax(1.0)}
        written = token | kept | {"rows": two, "keys": heads, "values": heads}
        angles = rope_angles(two, RopeTable([1.0] * 16), self.workers)
        projected = {"queries": heads, "norms": (self._weight, self._weight, 1e-6)}
        size = {"tokens": 1, "kv_heads": 2, "head_dim": 32, "dtype": mx.float32}
        inputs = DELTA.inputs(2)
        recurrent = {name: mx.array(getattr(inputs, name)) for name in ("qkv", "z", "a", "b")}
        states = {"rows": self.slots.rows([(2, None, [(2, 0)])]), "offset": 0}
        calls: dict[str, Call] = {
            "Softmax": (Softmax, {"scale": 1.0, "window": 1, "sinks": mx.zeros((2,))}),
            "append": (append, written),
            "decode_attention": (decode_attention, reads | {"first_row": 0}),
            "chunk_attention": (chunk_attention, reads | {"segment": 0}),
            "project_append": (project_append, written | projected | {"angles": angles}),
            "region_view": (
                region_view,
                token | size | {"range": self.range, "region": 0, "first": 0},
            ),
            "block_copy": (block_copy, token | source | target),
            "gated_delta": (
                gated_delta,
                token | recurrent | states | {"delta": DELTA.native, "workers": self.workers},
            ),
            "GatedDelta": (GatedDelta, DELTA.arguments),
        }
        regions = dict(zip(REGIONS, (0, 1), strict=True))
        return calls | {
            f"Layer by {name}": (_over_layer(*calls[name]), regions) for name in LAYERED
        }

    def _weight_calls(self) -> dict[str, Call]:
        workers, x, packed = {"workers": self.workers}, {"x": self._x}, {"packed": self._packed}
        plain = mx.ones((OUTPUTS, INPUTS))
        words, scales, biases = mx.quantize(plain, 32, 4)
        mx.eval(logits := mx.zeros((2, VOCABULARY)))
        stacks = [mx.stack([each] * EXPERTS) for each in (words, scales, biases)]
        normed = x | {"norm": self._weight, "eps": 1e-6}
        multiplied = normed | packed | workers | {"residual": mx.ones((2, OUTPUTS))}
        matrices = [mx.ones(shape) for shape in ((INPUTS, OUTPUTS // 2), (EXPERTS, INPUTS))]
        down, router = (PackedLinear([matrix], self.workers, []) for matrix in matrices)
        experts = [mx.ones((EXPERTS, OUTPUTS, INPUTS)), mx.ones((EXPERTS, INPUTS, OUTPUTS // 2))]
        stacked, back = (PackedExperts([matrix], self.workers, []) for matrix in experts)
        mixture = {"router": router, "gate_up": stacked, "down": back, "chosen": 2}
        widths = ((), (OUTPUTS,), (INPUTS,))
        mixture |= {"biases": tuple(mx.zeros((EXPERTS, *width)) for width in widths)}
        choices, noise = mx.array([[1.0, 0, 1, 0]] * 2), mx.zeros((2, 2**16))
        noisy = {"noise_keys": mx.zeros((2, 2), mx.uint32), "noise": noise}
        return {
            "PackedLinear": (
                PackedLinear,
                workers | {"weights": [words], "codes": [(scales, biases, 4, 32)]},
            ),
            "PackedLinear by weights": (PackedLinear, workers | {"weights": [plain], "codes": []}),
            "PackedExperts": (
                PackedExperts,
                workers | {"weights": stacks[:1], "codes": [(*stacks[1:], 4, 32)]},
            ),
            "PackedExperts by weights": (
                PackedExperts,
                workers | {"weights": experts[:1], "codes": []},
            ),
            "packed_bytes": (packed_bytes, {"inputs": 128, "matrices": [(1, mx.float32, 4, 32)]}),
            "linear": (linear, multiplied),
            "linear_heads": (linear_heads, multiplied | {"heads": [1]}),
            "gated_mlp": (gated_mlp, normed | workers | {"gate_up": self._packed, "down": down}),
            "mixture_mlp": (
                mixture_mlp,
                normed | workers | mixture | {"normalised": True, "shared": None},
            ),
            "rms_norm": (
                rms_norm,
                x | workers | {"weight": self._weight, "eps": 1e-6, "residual": self._x},
            ),
            "packed_rows": (packed_rows, packed | workers | {"ids": mx.array([0, 1])}),
            "choose_tokens": (
                choose_tokens,
                workers | noisy | {"raw": logits, "adjusted": logits + 1, "choices": choices},
            ),
            "uncounted": (uncounted, {"array": logits, "transposable": True}),
        }


def _over_layer(function: Callable[..., object], arguments: dict[str, Any]) -> Callable[..., Any]:
    def called(key_region: int, value_region: int) -> object:
        return function(**(arguments | {"layer": Layer(key_region, value_region, mx.float32)}))

    return called


def _changed(whole: Any, path: Sequence[str], value: object) -> Any:
    """Return an argument with that value inside: in the first item of lists."""
    if isinstance(whole, list):
        return [_changed(whole[0], path, value), *whole[1:]]
    if not path:
        return value
    place = int(path[0])
    return (*whole[:place], _changed(whole[place], path[1:], value), *whole[place + 1 :])


# --- integers ------------------------------------------------------------------------------------

# By their places: what an error names, the lowest and the highest number.
INTERVALS = {
    "packed_bytes(inputs)": ("inputs", 1, 2**31 - 1),
    "packed_bytes(matrices.0)": ("outputs", 1, 2**31 - 1),
    "Geometry(page_bytes)": ("page_bytes", 1, 2**36),
    "Geometry(tokens_per_block)": ("tokens_per_block", 1, 2**24),
    "Geometry(blocks_per_heap)": ("blocks_per_heap", 1, 2**24),
    "Geometry(blocks_per_range)": ("blocks_per_range", 1, 2**24),
    "Geometry(region_row_bytes)": ("row_bytes", 1, 2**20),
    "Geometry(ring_blocks)": ("ring_blocks", 0, 2**24),
    "AddressRange.map(heap_block)": ("heap blocks", 0, BLOCKS - 1),
    "AddressRange.map(block)": ("range blocks", 0, BLOCKS - 1),
    "AddressRange.map(count)": ("range blocks", 1, BLOCKS - 4),
    **{
        f"AddressRange.{name}({argument})": interval
        for name in ("write_block", "read_block")
        for argument, interval in {
            "block": ("range blocks", 0, BLOCKS - 1),
            "fd": ("fd", 0, 2**31 - 1),
            "offset": ("offset", 0, 2**63 - 1 - RECORD_BYTES),
        }.items()
    },
    "Mapper.map(heap_block)": ("heap blocks", 0, BLOCKS - 1),
    "Mapper.map(block)": ("range blocks", 0, BLOCKS - 1),
    "Mapper.map(count)": ("range blocks", 1, BLOCKS - 4),
    "Mapper.refused(ticket)": ("ticket", 1, 2**63 - 2),
    "Mapper.unmap(block)": ("range blocks", 0, BLOCKS - 1),
    "Mapper.unmap(count)": ("range blocks", 1, BLOCKS),
    "Mapper.release(block)": ("heap blocks", 0, BLOCKS - 1),
    "Mapper.release(count)": ("heap blocks", 1, BLOCKS),
    "Mapper.wait(ticket)": ("ticket", 0, 2**63 - 2),
    "CpuWorkers(threads)": ("threads", 1, 256),
    "RowTable(segments.1)": ("segment of mapped tokens", 0, MAPPED_TOKENS - 1),
    "RowTable(segments.2)": ("segment of mapped tokens", 1, MAPPED_TOKENS),
    **{f"Layer by {name}({region})": (region, 0, 1) for name in LAYERED for region in REGIONS},
    "Softmax(window)": ("window", 1, 2**31 - 1),
    "decode_attention(first_row)": ("rows of the table", 0, 1),
    "decode_attention(kv_heads)": ("kv_heads", 1, 2),
    "chunk_attention(segment)": ("segments of the table", 0, 1),
    "chunk_attention(kv_heads)": ("kv_heads", 1, 2),
    "region_view(region)": ("region", 0, 1),
    "region_view(tokens)": ("tokens", 1, MAPPED_TOKENS),
    "region_view(kv_heads)": ("kv_heads", 1, 256),
    "region_view(head_dim)": ("head_dim", 1, 256),
    "region_view(first)": ("mapped tokens", 0, 0),
    "block_copy(source_block)": ("source blocks", 0, MAPPED_BLOCKS - 1),
    "block_copy(target_block)": ("target blocks", 0, MAPPED_BLOCKS - 1),
    "block_copy(tokens)": ("tokens", 1, SHAPE.tokens_per_block),
    "linear_heads(heads)": ("heads", 1, OUTPUTS),
    "mixture_mlp(chosen)": ("chosen", 1, EXPERTS),
    "StateMemory(bytes)": ("bytes", 1, 2**46),
    "StateMemory.release(offset)": ("bytes of the memory", 0, 0),
    "StateMemory.release(bytes)": ("bytes of the memory", 1, PAGE),
    "StateMemory.committed(offset)": ("bytes of the memory", 0, 0),
    "StateMemory.committed(bytes)": ("bytes of the memory", 1, PAGE),
    **{
        f"StateMemory.{name}({argument})": interval
        for name in ("write_record", "read_record")
        for argument, interval in {
            "offset": ("bytes of the memory", 0, 0),
            "bytes": ("bytes of the memory", 1, PAGE),
            "fd": ("fd", 0, 2**31 - 1),
            "file_offset": ("offset", 0, 2**63 - 1 - PAGE),
        }.items()
    },
    "StateRows(segments.0)": ("count", 1, 2**24),
    # Right ones are where memory happens to lie; 0 is none.
    "StateRows(segments.1)": ("address", 2, 3),
    "StateRows(segments.2.0)": ("rows", 1, 1),
    "StateRows(segments.2.1)": ("address", 1, 3),
    "GatedDelta(key_heads)": ("key_heads", 1, 2),
    "GatedDelta(value_heads)": ("value_heads", 1, 256),
    "GatedDelta(key_dim)": ("key_dim", 16, 256),
    "GatedDelta(value_dim)": ("value_dim", 16, 256),
    "gated_delta(offset)": ("bytes of a slot", 0, PAGE - SLOT_BYTES),
}
# Of which few numbers are right: others are a ValueError.
CHOICES = {
    *("PackedLinear(codes.2)", "PackedLinear(codes.3)"),
    *("PackedExperts(codes.2)", "PackedExperts(codes.3)"),
    *("packed_bytes(matrices.2)", "packed_bytes(matrices.3)"),
}
INTEGERS = (*INTERVALS, *sorted(CHOICES))


# --- arrays --------------------------------------------------------------------------------------

WITHOUT_CODES = {"PackedLinear by weights(weights)", "PackedExperts by weights(weights)"}
FLOATS = (mx.float32, mx.bfloat16, mx.float16, mx.complex64)
DTYPES = (*FLOATS, mx.int32, mx.uint32, mx.uint8, mx.bool_)
SHAPES = (
    (), (0,), (1,), (32,), (33,), (100,), (0, 32), (1, 32), (2, 0), (2, 5), (2, 32), (2, 33),
    (2, 64), (2, 100), (2, 192), (3, 32), (32, 2), (64, 1), (64, 4), (64, 32), (2, 1, 32),
    (2, 2, 16), (2, 2, 32), (2, 3, 32), (3, 2, 32), (2, 2, 1, 32),
)  # fmt: skip
# More than there is memory for, of one number: seen before anything is taken for them, or refused.
LONG = 2**31 - 1
HUGE_SHAPES = ((LONG,), (LONG, 32), (2, LONG), (LONG, LONG), (LONG, 2, 32))
FILLINGS = (0, -1, 63, 64, 4000, 2**31 - 1, -(2**31), float("nan"), float("inf"))


def hostile_arrays() -> Iterator[mx.array]:
    """Of every type and shape that somebody might take for a right one; of right shapes and wrong
    contents; of memory that lies in any way."""
    for dtype in DTYPES:
        for shape in SHAPES:
            yield mx.zeros(shape, dtype)
        for shape in HUGE_SHAPES:
            yield mx.broadcast_to(mx.zeros((), dtype), shape)
    for filling in FILLINGS:
        for shape in ((2,), (32,), (2, 5), (2, 32), (2, 64), (2, 100), (2, 2, 32)):
            yield mx.full(shape, filling, mx.float32)
            if filling == filling and abs(filling) < 2**63:
                yield mx.full(shape, int(filling), mx.int32)
    for shape in ((2, 32), (2, 64), (2, 100), (2, 192), (2, 2, 32)):
        yield mx.ones(shape[::-1]).transpose()
        yield mx.ones((3 * shape[0], *shape[1:]))[::-3]
        yield mx.broadcast_to(mx.ones((1,)), shape)


# --- the stub ------------------------------------------------------------------------------------


def places_of(kind: str) -> set[str]:
    """Where the stub takes that type, but for what only Metal has: "function(argument)",
    "Class(argument)" of its constructor, "Class.method(argument)"; ".n" for a place of a tuple."""
    found = set[str]()
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            if node.name not in METAL_FUNCTIONS:
                found |= _places(node, node.name, kind)
        elif isinstance(node, ast.ClassDef) and node.name not in METAL_TYPES:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    made = method.name == "__init__"
                    name = node.name if made else f"{node.name}.{method.name}"
                    found |= _places(method, name, kind)
    return found


def _places(function: ast.FunctionDef, name: str, kind: str) -> set[str]:
    arguments = [a for a in (*function.args.args, *function.args.kwonlyargs) if a.annotation]
    annotations = {a.arg: a.annotation for a in arguments if a.annotation is not None}
    if any(ast.unparse(annotation) in METAL_TYPES for annotation in annotations.values()):
        return set()
    return {
        f"{name}({argument}{place})"
        for argument, annotation in annotations.items()
        for place in _inside(annotation, kind)
    }


def _inside(annotation: ast.expr, kind: str) -> Iterator[str]:
    """Where in an annotation the type stands: "" for itself, ".2" in a tuple."""
    if ast.unparse(annotation).removesuffix(" | None") == kind:
        yield ""
    elif isinstance(annotation, ast.BinOp):  # one of several types
        yield from _inside(annotation.left, kind)
        yield from _inside(annotation.right, kind)
    elif isinstance(annotation, ast.Subscript):
        parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else None
        if parts is None:
            yield from _inside(annotation.slice, kind)
        else:
            for number, part in enumerate(parts):
                yield from (f".{number}{place}" for place in _inside(part, kind))


# --- all of them ---------------------------------------------------------------------------------


def attempt(
    call: Callable[[], object],
    *,
    evaluates: bool,
    refused: tuple[type[Exception], ...] = REFUSED,
) -> str:
    """What is wrong with how the call ended; "" where it was refused, or came to a result."""
    try:
        result = call()
    except refused:
        return ""
    except OSError as error:
        return "" if error.errno == errno.ENOMEM else f"a system call failed: {error!r}"
    except RuntimeError as error:
        return "" if str(error).endswith(BUGS) else f"not refused by name: {error!r}"
    found = result if isinstance(result, tuple) else (result,)
    arrays = [x for x in found if isinstance(x, mx.array)]
    if any(size < 0 for x in arrays for size in x.shape):
        return f"shapes {[x.shape for x in arrays]}"
    if evaluates:
        mx.eval(arrays)
    active = mx.get_active_memory()
    return "" if active < MOST_ACTIVE_BYTES else f"{active} bytes of active memory"


def calls() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """All of them, with what they are given, and whether a result can be computed."""
    for place in INTEGERS:
        for number in HOSTILE:
            # Numbers that are right map and unmap: whoever comes next has memory of his own.
            yield f"{place} = {number}", partial(Setting().call, place, number), True
    setting, places = Setting(), sorted(places_of("mx.array") | WITHOUT_CODES)
    for array in hostile_arrays():
        for place in places:
            # MLX copies what lies as no kernel reads it, and does not look whether it has memory.
            told, computable = f"{place} = {array.dtype} {array.shape}", array.size < MOST_NUMBERS
            yield told, partial(setting.call, place, array), computable


def main() -> None:
    """Prints each call before it is made, so that the last line names one that ends the process;
    ends with 1 where one ended wrongly."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_BYTES, MOST_ADDRESS_BYTES))
    mx.set_default_device(mx.Device(mx.cpu))
    wrong = 0
    for name, call, evaluates in calls():
        print(name, flush=True)
        refused = (*REFUSED, OSError) if any(place in name for place in ON_FILES) else REFUSED
        if fault := attempt(call, evaluates=evaluates, refused=refused):
            print(f"WRONG: {fault}", flush=True)
            wrong += 1
    sys.exit(1 if wrong else 0)
