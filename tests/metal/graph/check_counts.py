"""What a step of decoding costs the host, pinned for the models of engine/models/README.md:
commands, operations of MLX's graph, and command buffers, with one sequence and with eight.

Counted in the graph that the engine's own forward makes of the whole model, as the engine loads it.
Nothing of it is evaluated, and weights take no memory.
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
from engine.models.checkpoint import promised_checkpoint, promised_tensors
from engine.models.config import ModelConfig
from engine.models.forward import Forward
from engine.models.mlx_ops import MlxOps
from engine.models.spec import ModelSpec
from engine.models.stored import StoredWeights
from engine.models.weights import load_model
from engine.planning.cost import CostModel
from engine.planning.devices import CPU
from kvcache.backends.backend import Segment
from kvcache.backends.metal import MetalBackend
from kvcache.layout import KVFormat, paged_layout
from kvcache.slots import StateSegment
from kvcache.views import KVViews, OrderingHandles, layer_regions
from metal_ext.loading import LARGER_BUFFERS
from server.cli.suggestions import configs
from tests.families import BONSAI, PUBLISHED_DELTA, QWEN3_NEXT, bonsai_modules
from tests.metal.graph import _standin
from tests.metal.graph.stage import PAGE, Shape, Stage

SUGGESTED = configs()
MODELS = SUGGESTED | {
    "bonsai-2:27b": SUGGESTED["bonsai-2:27b"]
    | BONSAI
    | {"dtype": "float16", "modules": bonsai_modules(64, 4, 1024)},
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
    "qwen2.5-coder:32b": SUGGESTED["qwen3:14b"]
    | {"model_type": "qwen2", "num_hidden_layers": 64, "vocab_size": 152064}
    | {"intermediate_size": 27648},
}
"""Fields of config.json: of the models that quire suggests, and of further kinds."""
TOKENS = 257  # of the first sequence: the fewest for which attention is two commands
# For one sequence, and for eight: commands, operations, command buffers on each of CHIPS.
COSTS = {
    "qwen3.6:35b": ((520, 416, 3, 13, 11), (520, 416, 3, 13, 11)),
    "qwen3-coder:30b": ((586, 592, 3, 15, 12), (586, 592, 3, 15, 12)),
    "qwen3.6:27b": ((634, 656, 3, 16, 13), (634, 656, 3, 16, 13)),
    "bonsai-2:27b": ((2050, 2846, 9, 50, 41), (2050, 2846, 9, 50, 41)),
    "qwen3:14b": ((370, 496, 2, 9, 8), (370, 496, 2, 9, 8)),
    "qwen3.5:9b": ((322, 336, 2, 8, 7), (322, 336, 2, 8, 7)),
    "qwen3:8b": ((334, 448, 2, 9, 7), (334, 448, 2, 9, 7)),
    "llama3.1:8b": ((298, 400, 2, 8, 6), (298, 400, 2, 8, 6)),
    "qwen3.5:4b": ((322, 336, 2, 8, 7), (322, 336, 2, 8, 7)),
    "qwen3:4b": ((334, 448, 2, 9, 7), (334, 448, 2, 9, 7)),
    "llama3.2:3b": ((262, 352, 2, 7, 6), (262, 352, 2, 7, 6)),
    "qwen3:1.7b": ((262, 352, 2, 7, 6), (262, 352, 2, 7, 6)),
    "qwen3.5:0.8b": ((244, 256, 1, 6, 5), (244, 256, 1, 6, 5)),
    "qwen3:0.6b": ((262, 352, 2, 7, 6), (262, 352, 2, 7, 6)),
    "qwen3:32b": ((586, 784, 3, 15, 12), (586, 784, 3, 15, 12)),
    "qwen3-coder-next": ((622, 496, 3, 15, 13), (622, 496, 3, 15, 13)),
    "qwen2.5:7b": ((262, 352, 2, 7, 6), (262, 352, 2, 7, 6)),
    "qwen2.5-coder:32b": ((586, 784, 3, 15, 12), (586, 784, 3, 15, 12)),
}
# Commands that matrices of plain numbers share, where the others are in 2 bits.
NOT_PLANNED = {"bonsai-2:27b": 48}
EVERY_LAYER = {"observed": 2, "multiply": 3, "multiply_gated": 1}  # two norms
ATTENTION = {"project_append": 1, "decode_attention": 1}
LAYER = EVERY_LAYER | ATTENTION | {"Reshape": 4}
RECURRENT_LAYER = EVERY_LAYER | {"Reshape": 1, "gated_delta": 1}
DTYPES = {"U32": mx.uint32, "BF16": mx.bfloat16, "F16": mx.float16}
SLOT_BYTES = 1 << 23
ACTIVE_TASKS = 10  # command buffers beyond which MLX hands over nothing (transforms.cpp)
# The inputs that quire's operations copy first if they do not lie in order.
COPIED = {"decode_attention": {1}, "gated_delta": {*range(1, 9)}, "project_append": {1, 2, 3}}


class Chip(NamedTuple):
    """When MLX ends a command buffer there."""

    commands: int
    mebinumbers: int
    splits: bool = False
    """Whether a product of eight rows with a large matrix may be two commands, as on M1 and M2."""


COMMANDS, MEBINUMBERS = map(int, LARGER_BUFFERS.values())
CHIPS = {
    "M1 to M4": Chip(COMMANDS, MEBINUMBERS, splits=True),
    "M5": Chip(40, 40),
    "M5 Max": Chip(50, 50),
}
Operation = tuple[str, list[tuple[int, int]], set[int]]
"""As _standin.operations_behind returns it."""


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """As on a Mac. Nothing that MLX compiles is evaluated here."""
    mx.enable_compile()
    yield
    mx.disable_compile()


def load(folder: Path, name: str, **fields: Any) -> tuple[ModelSpec, Forward]:
    """One of MODELS with other fields, matrices of zeros, and vectors of ones."""
    (folder / "config.json").write_text(json.dumps(MODELS[name] | fields))
    checkpoint = promised_checkpoint(folder)
    weights = {
        name: mx.ones(its.shape, DTYPES[its.dtype])
        if len(its.shape) == 1
        else _standin.zeros_of_nothing([*its.shape], DTYPES[its.dtype])
        for name, its in promised_tensors(ModelConfig(folder), checkpoint.tensors).items()
    }
    stored = StoredWeights(weights, checkpoint.packings.get)
    with mock.patch.object(engine.models.weights, "read_weights", return_value=stored):
        return checkpoint.spec, load_model(checkpoint, lambda *_: None, None)


def step(
    spec: ModelSpec, forward: Forward, tokens: int, rows: int = 1
) -> tuple[list[Operation], float]:
    """The operations that make the next token of each sequence, its greatest logit; and the
    processor's time for making the graph. Of so many sequences the first has ``tokens``, others
    one."""
    with views_of(spec, [tokens] + [1] * (rows - 1)) as views, one_operation_each():
        begun = time.process_time()
        states = forward.hidden(mx.array([1] * rows), views, mx.array([*range(rows)]))
        assert states is not None
        ends = views.step_end([forward.head(states).argmax(axis=-1)])
        took_s = time.process_time() - begun
        return _standin.operations_behind(ends), took_s


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
        assert all(map(slots.commit, range(sequences)))
        states = slots.rows(begun, rows)
    views = KVViews(layer_regions(layout), kept, [segment.count for segment in segments], 1)
    views.add(rows, segments)
    views.states = states
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


def commands(operations: Sequence[Operation], tokens: int, split_rows: int = 0) -> int:
    """The number of commands of a step's operations. tokens: the length of each sequence.
    split_rows: the step's rows on an M1 or M2, where a product of eight rows with a large matrix of
    few outputs is two commands (MLX's get_qmv_batch_limit and qmm_splitk)."""
    several = {"decode_attention": 2 if tokens > 256 else 1, "gated_delta": 3, "mixture": 4}
    total = 0
    for name, buffers, scattered in operations:
        if buffers:  # the others are views
            total += several.get(name, 1) + len(scattered & COPIED.get(name, set()))
        if name == "QuantizedMatmul" and split_rows > 6:
            inputs, outputs = buffers[0][1] // split_rows, buffers[-1][1] // split_rows
            total += max(inputs, outputs) > 4096 and outputs <= 8192
    return total


def command_buffers(operations: Sequence[Operation], chip: Chip, rows: int) -> int:
    """How many command buffers MLX fills. It ends one behind the operation with which it has more
    commands than allowed, or more times 2**20 numbers in the arrays that they use."""
    done, open_commands, seen = 0, 0, dict[int, int]()
    for operation in operations:
        open_commands += commands([operation], TOKENS, rows * chip.splits)
        seen = dict(operation[1]) | seen
        if open_commands > chip.commands or sum(seen.values()) >> 20 > chip.mebinumbers:
            done, open_commands, seen = done + 1, 0, {}
    return done + (open_commands > 0)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_takes_few_command_buffers(name: str, tmp_path: Path, report: list[str]) -> None:
    spec, forward = load(tmp_path, name)
    kv, costs = spec.kv_shape(KVFormat.BFLOAT16, KVFormat.BFLOAT16), []
    for rows in (1, 8):
        operations, took_s = step(spec, forward, TOKENS, rows)
        total = commands(operations, TOKENS)
        buffers = {chip: command_buffers(operations, its, rows) for chip, its in CHIPS.items()}
        costs.append((total, len(operations), *buffers.values()))
        ahead = {chip: f"{min(1.0, ACTIVE_TASKS / its):.0%}" for chip, its in buffers.items()}
        report.append(
            f"{name}, {rows} at once: {total} commands, {len(operations)} operations; command "
            f"buffers {buffers}, so that the host can be {ahead} of a step ahead; the graph takes "
            f"{1e3 * took_s:.1f} ms of a processor here"
        )
        assert buffers.pop("M1 to M4") <= ACTIVE_TASKS
        assert all(its <= total // CHIPS[chip].commands + 1 for chip, its in buffers.items())
        planned = sum(CostModel.of(CPU, spec, 10**9, kv).commands(rows))
        assert total == planned - NOT_PLANNED.get(name, 0)
    assert tuple(costs) == COSTS[name]


def test_weights_that_count_would_fill_many(tmp_path: Path) -> None:
    with mock.patch.object(MlxOps, "stop_counting"):
        operations, _ = step(*load(tmp_path, "qwen3.6:35b"), TOKENS)
    assert [command_buffers(operations, chip, 1) for chip in CHIPS.values()] == [42, 83, 63]


@pytest.mark.parametrize(
    ("name", "tokens", "layer", "cost"),
    [
        ("qwen3:4b", TOKENS - 1, LAYER, 8),
        ("qwen3:4b", TOKENS, LAYER, 9),
        ("qwen3.5:4b", TOKENS, RECURRENT_LAYER, 9),
    ],
)
def test_a_layer_is_so_many_operations_and_commands(
    name: str, tokens: int, layer: dict[str, int], cost: int, tmp_path: Path
) -> None:
    whole, shorter = (
        step(*load(tmp_path, name, num_hidden_layers=layers), tokens)[0] for layers in (6, 5)
    )
    assert Counter(name for name, *_ in whole) - Counter(name for name, *_ in shorter) == layer
    assert commands(whole, tokens) - commands(shorter, tokens) == cost


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["qwen3.6:35b", "qwen3-coder:30b", "qwen3-coder-next"])
def test_a_mixture_is_six_commands_from_its_norm_to_the_residual(
    name: str, rows: int, tmp_path: Path
) -> None:
    """Its norm; the router and the shared expert's gate; and four of the mixture."""
    spec, forward = load(tmp_path, name)
    whole, _ = step(spec, forward, TOKENS, rows)
    with mock.patch.object(MlxOps, "add_mlp", lambda _, __, x: x):
        without, _ = step(spec, forward, TOKENS, rows)
    assert commands(whole, TOKENS) - commands(without, TOKENS) == 6 * len(spec.layers)
    assert commands(whole, TOKENS) <= 800


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
