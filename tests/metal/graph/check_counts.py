"""What a step of decoding costs the host, pinned: Qwen3-4B in four bits, one sequence; what a layer
of a hybrid with heads like Qwen3.5-4B's does; and the commands, operations and command buffers of
every kind of model that is served, with one and with eight sequences.

Counted in the graph that the engine's own forward makes of the whole model, as the engine loads it.
Nothing of it is evaluated, and its weights are zeros that take no memory.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import pytest

import engine.models.weights
import metal_ext
from engine.models.checkpoint import promised_checkpoint, promised_tensors
from engine.models.config import ModelConfig
from engine.models.forward import Forward
from engine.models.mlx_ops import MlxOps
from engine.models.spec import ModelSpec
from engine.models.stored import StoredWeights
from engine.models.weights import load_model
from kvcache.backend import Segment
from kvcache.layout import KVFormat, paged_layout
from kvcache.metal_backend import MetalBackend
from kvcache.slot_pool import StateSegment
from kvcache.views import KVViews, OrderingHandles, layer_regions
from metal_ext.loading import LARGER_BUFFERS
from server.cli.suggestions import configs
from tests.engine.models.hybrids import FIELDS
from tests.families import PUBLISHED_DELTA, QWEN3_NEXT
from tests.metal.graph import _standin
from tests.metal.graph.stage import PAGE, Shape, Stage
from tests.models import QWEN3_4B, write_config

PACKING = {"bits": 4, "group_size": 64, "mode": "affine"}
DTYPES = {"U32": mx.uint32, "BF16": mx.bfloat16}
SLOT_BYTES = 1 << 23
LAYERS = 36
LAYER = {
    "QuantizedMatmul": 7,
    "Reshape": 4,
    "observed": 2,  # norms
    "Add": 2,
    "project_append": 1,
    "decode_attention": 1,
    "swiglu": 1,
}
# Of gated delta nets, and how many layers have one for each that attends.
HYBRID = FIELDS | PUBLISHED_DELTA
RECURRENT_LAYER = {
    "QuantizedMatmul": 8,
    "observed": 2,  # norms
    "Reshape": 1,
    "Add": 2,
    "gated_delta": 1,
    "swiglu": 1,
}
# The inputs that quire's operations, or views, copy first if they do not lie in order.
COPIED = {"decode_attention": {1}, "gated_delta": {*range(1, 9)}, "project_append": {1, 2, 3}}
COPIED |= {"swiglu": {0, 1}}


class Chip(NamedTuple):
    """When MLX ends a command buffer there."""

    commands: int
    mebinumbers: int
    splits: bool = False
    """Whether it has two commands for some products of several rows."""


LARGER = [int(most) for most in LARGER_BUFFERS.values()]
CHIPS = {
    "M1 and M2": Chip(*LARGER, splits=True),
    "M3 and M4": Chip(*LARGER),
    "M5": Chip(40, 40),
    "M5 Max": Chip(50, 50),
}
Operation = tuple[str, list[tuple[int, int]], set[int]]
"""As _standin.operations_behind returns it."""


def step(folder: Path, tokens: int, layers: int = LAYERS, **fields: Any) -> list[Operation]:
    """The operations that make one sequence's next token, which is its greatest logit.

    tokens: that are attended to. fields: of config.json, where it is another model.
    """
    spec = replace(QWEN3_4B, num_hidden_layers=layers)
    write_config(folder, spec, quantization=PACKING, **fields)
    return operations(*load(folder), tokens)


def load(folder: Path) -> tuple[ModelSpec, Forward]:
    """A model whose weights are zeros that take no memory."""
    checkpoint = promised_checkpoint(folder, 0)
    weights = {
        name: _standin.zeros(its.shape, DTYPES[its.dtype])
        for name, its in promised_tensors(ModelConfig(folder), checkpoint.tensors).items()
    }
    stored = StoredWeights(weights, checkpoint.packings.get)
    with mock.patch.object(engine.models.weights, "read_weights", return_value=stored):
        return checkpoint.spec, load_model(checkpoint, lambda *_: None, None)


def operations(
    spec: ModelSpec, forward: Forward, tokens: int, rows: int = 1, took_s: list[float] | None = None
) -> list[Operation]:
    """Of a step with so many sequences. The first has so many tokens, others one. took_s: gets the
    processor's time for making the graph."""
    with views_of(spec, [tokens] + [1] * (rows - 1)) as views, one_operation_each():
        begun = time.process_time()
        states = forward.hidden(mx.array([1] * rows), views, mx.array([*range(rows)]))
        assert states is not None
        ends = views.step_end([forward.head(states).argmax(axis=-1)])
        if took_s is not None:
            took_s.append(time.process_time() - begun)
        return _standin.operations_behind(ends)


@contextmanager
def views_of(spec: ModelSpec, lengths: Sequence[int]) -> Iterator[KVViews]:
    """What a step sees that makes sequences so long by one token each, in sparse memory."""
    shape = spec.kv_shape(KVFormat.BFLOAT16, KVFormat.BFLOAT16)
    layout = paged_layout(
        shape, max_tokens=max(lengths), heap_bytes=1, system_page_bytes=PAGE, page_bytes=PAGE
    )
    sequences, heaps = len(lengths), count()
    backend = MetalBackend("sparse", layout.groups[0], max_buffers=sequences, release_heaps=False)
    for buffer, tokens in enumerate(lengths):
        assert backend.add_buffer()
        for block in range(layout.blocks_for(tokens)):
            assert backend.add_heap()
            assert backend.map(buffer, block, next(heaps), 0, 1, writable=True)
    backend.finish_mappings()
    segments = [Segment(buffer, tokens - 1, 1) for buffer, tokens in enumerate(lengths)]
    kept = OrderingHandles(len(shape.layers), len(shape.states))
    mx.eval(kept.newest, kept.newest_states)  # as after any step
    rows, states = backend.rows(segments), None
    if shape.slot is not None:
        assert isinstance(backend, MetalBackend)
        # Nothing is written, so that all layers' states may lie in one place.
        slot = replace(shape.slot, offsets=(0,) * len(shape.states), slot_bytes=SLOT_BYTES)
        slots = backend.new_states(slot, sequences)
        begun = [StateSegment(1, None, ((1, number),)) for number in range(sequences)]
        states = slots.rows(begun, rows)
    views = KVViews(layer_regions(layout), kept, [rows], segments, 1, states)
    yield views
    views.cancel()
    assert backend.shut_down()


@contextmanager
def one_operation_each() -> Iterator[None]:
    """What MLX 0.32 has as one operation on a GPU, and as several on a CPU (mlx/fast.cpp, ops.cpp),
    is one here."""

    def normed(x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return _standin.observed(x, [weight])

    def numbers(
        words: mx.array, scales: mx.array, biases: mx.array, group: int, *how: Any, dtype: mx.Dtype
    ) -> mx.array:
        wide = mx.broadcast_to(mx.zeros((), dtype), (len(words), scales.shape[-1] * group))
        mx.eval(wide)
        return _standin.observed(wide, [words, scales, biases])

    with (
        mock.patch.object(mx.fast, "rms_norm", normed),
        mock.patch.object(mx, "dequantize", numbers),
    ):
        yield


def names_of(operations: Sequence[Operation]) -> Counter[str]:
    return Counter(name for name, *_ in operations)


def commands(operations: Sequence[Operation], tokens: int, split_rows: int = 0) -> int:
    """How many commands the operations of a step over so many tokens have. split_rows: of a product
    on an M1 or M2, which has two commands for eight rows and a large matrix with few outputs (MLX's
    get_qmv_batch_limit and qmm_splitk)."""
    several = {"decode_attention": 2 if tokens > 256 else 1, "gated_delta": 2}
    total = 0
    for name, buffers, scattered in operations:
        if buffers:  # the others are views
            total += several.get(name, 1) + len(scattered & COPIED.get(name, set()))
        if name == "QuantizedMatmul" and split_rows > 6:
            inputs, outputs = buffers[0][1] // split_rows, buffers[-1][1] // split_rows
            total += max(inputs, outputs) > 4096 and outputs <= 8192
    return total


def command_buffers(operations: Sequence[Operation], tokens: int, chip: Chip, rows: int = 1) -> int:
    """How many command buffers MLX fills. It ends one behind the operation with which it has more
    commands than allowed, or more times 2**20 numbers in the arrays that they use."""
    done, open_commands, seen = 0, 0, dict[int, int]()
    for operation in operations:
        open_commands += commands([operation], tokens, rows * chip.splits)
        seen = dict(operation[1]) | seen
        if open_commands > chip.commands or sum(seen.values()) >> 20 > chip.mebinumbers:
            done, open_commands, seen = done + 1, 0, {}
    return done + (open_commands > 0)


@pytest.mark.parametrize(("tokens", "a_layer", "a_step"), [(256, 14, 514), (257, 15, 550)])
def test_a_step_is_so_many_operations_and_commands(
    tokens: int, a_layer: int, a_step: int, tmp_path: Path, report: list[str]
) -> None:
    whole, shorter = step(tmp_path, tokens), step(tmp_path, tokens, LAYERS - 1)
    names = names_of(whole) - names_of(shorter)
    report.append(
        f"Qwen3-4B in 4 bits, one sequence of {tokens} tokens: {a_layer} commands and "
        f"{names.total()} operations a layer, {a_step} and {len(whole)} a step"
    )
    assert names == LAYER
    assert commands(whole, tokens) == a_step
    assert commands(whole, tokens) - commands(shorter, tokens) == a_layer


def test_a_recurrent_layer_is_so_many_operations_and_commands(tmp_path: Path) -> None:
    whole, shorter = (step(tmp_path, 200, layers, **HYBRID) for layers in (6, 5))
    names = names_of(whole) - names_of(shorter)
    assert names == RECURRENT_LAYER
    assert commands(whole, 200) - commands(shorter, 200) == 15


def test_commands_are_counted_as_they_are_encoded() -> None:
    """Of quire's own operations, on a stage."""
    for tokens, split in ((256, 1), (257, 2)):
        stage = Stage("sparse", Shape(kv_heads=1, layers=1, query_heads=2))
        one = stage.open(tokens)
        stage.step((one, tokens - 1))
        before = _standin.counts()["commands"]
        stage.step((one, 1))
        mine = ("append", "decode_attention", "step_end")
        assert _standin.counts()["commands"] - before == len(mine) - 1 + split
        stage.end()
    before = _standin.counts()["commands"]
    mx.eval(metal_ext.swiglu(mx.ones((4, 4)), mx.ones((4, 4))))
    assert _standin.counts()["commands"] - before == 1


ACTIVE_TASKS = 10  # command buffers beyond which MLX hands over nothing (transforms.cpp)
SUGGESTED = configs()
MODELS = SUGGESTED | {
    "qwen3:32b": SUGGESTED["qwen3:14b"]
    | {"num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600},
    "qwen3-coder-next": SUGGESTED["qwen3.6:35b"]
    | QWEN3_NEXT
    | PUBLISHED_DELTA
    | {"num_hidden_layers": 48, "vocab_size": 151936, "num_experts": 512}
    | {"num_experts_per_tok": 10, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512},
    "qwen2.5:7b": SUGGESTED["qwen3:8b"]
    | {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "vocab_size": 152064}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944},
}
"""Fields of config.json: of the models that quire suggests, and of further kinds."""
# Of a step with one sequence and with eight, the first of 257 tokens: commands, operations of
# MLX's graph, command buffers on each of CHIPS.
COSTS = {
    "qwen3.6:35b": ((1560, 2246, 7, 7, 38, 31), (1800, 2566, 8, 8, 44, 36)),
    "qwen3-coder:30b": ((1450, 2320, 6, 6, 36, 29), (1738, 2704, 7, 7, 43, 35)),
    "qwen3.6:27b": ((1018, 1088, 5, 5, 25, 20), (1018, 1088, 6, 5, 25, 20)),
    "qwen3:14b": ((610, 736, 3, 3, 15, 12), (610, 736, 4, 3, 15, 12)),
    "qwen3.5:9b": ((514, 552, 3, 3, 13, 11), (514, 552, 3, 3, 13, 11)),
    "qwen3:8b": ((550, 664, 3, 3, 14, 11), (550, 664, 3, 3, 14, 11)),
    "llama3.1:8b": ((490, 592, 2, 2, 12, 10), (490, 592, 3, 2, 12, 10)),
    "qwen3.5:4b": ((514, 552, 3, 3, 13, 11), (514, 552, 3, 3, 13, 11)),
    "qwen3:4b": ((550, 664, 3, 3, 14, 11), (550, 664, 3, 3, 14, 11)),
    "llama3.2:3b": ((430, 520, 2, 2, 11, 9), (430, 520, 3, 2, 11, 9)),
    "qwen3:1.7b": ((430, 520, 2, 2, 11, 9), (430, 520, 3, 2, 11, 9)),
    "qwen3.5:0.8b": ((388, 418, 2, 2, 10, 8), (388, 418, 2, 2, 10, 8)),
    "qwen3:0.6b": ((430, 520, 2, 2, 11, 9), (430, 520, 2, 2, 11, 9)),
    "qwen3:32b": ((970, 1168, 4, 4, 24, 20), (970, 1168, 6, 4, 24, 20)),
    "qwen3-coder-next": ((1870, 2692, 8, 8, 46, 37), (2158, 3076, 9, 9, 53, 43)),
    "qwen2.5:7b": ((514, 688, 3, 3, 13, 11), (514, 688, 3, 3, 13, 11)),
}


def load_named(name: str, folder: Path) -> tuple[ModelSpec, Forward]:
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    return load(folder)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_takes_few_command_buffers(name: str, tmp_path: Path, report: list[str]) -> None:
    spec, forward = load_named(name, tmp_path)
    costs = []
    for rows in (1, 8):
        found = operations(spec, forward, 257, rows, took_s := [])
        total = commands(found, 257)
        buffers = {name: command_buffers(found, 257, its, rows) for name, its in CHIPS.items()}
        assert max(buffers["M1 and M2"], buffers["M3 and M4"]) <= ACTIVE_TASKS
        assert buffers["M5"] <= total // CHIPS["M5"].commands + 1
        assert buffers["M5 Max"] <= total // CHIPS["M5 Max"].commands + 1
        costs.append((total, len(found), *buffers.values()))
        ahead = {chip: f"{min(1.0, ACTIVE_TASKS / its):.0%}" for chip, its in buffers.items()}
        report.append(
            f"{name}, {rows} at once: {total} commands, {len(found)} operations; command buffers "
            f"{buffers}, so that the host can be {ahead} of a step ahead; the graph takes "
            f"{1e3 * took_s[0]:.1f} ms of a processor here"
        )
    assert tuple(costs) == COSTS[name]


@pytest.mark.parametrize(
    ("name", "buffers"), [("qwen3.6:35b", (42, 83, 63)), ("qwen3-coder:30b", (38, 75, 74))]
)
def test_weights_that_count_would_fill_many(
    name: str, buffers: tuple[int, ...], tmp_path: Path
) -> None:
    with mock.patch.object(MlxOps, "stop_counting"):
        spec, forward = load_named(name, tmp_path)
    found, chips = operations(spec, forward, 257), list(CHIPS.values())[1:]
    assert tuple(command_buffers(found, 257, its) for its in chips) == buffers
