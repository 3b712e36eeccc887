"""What a step of decoding costs: operations in MLX's graph, commands and command buffers.

Counted in the graph that the engine's own forward makes of a model of Qwen3-4B's size in four bits.
Nothing of it is evaluated, and its weights are one number each, so that it needs no memory.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from engine.models.checkpoint import promised_tensors, tensors_of
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.forward import Forward
from engine.models.mlx_ops import MlxOps
from engine.models.spec import ModelSpec
from engine.models.stored import StoredWeights
from kvcache.backend import Segment
from kvcache.layout import KVFormat, paged_layout
from kvcache.metal_backend import MetalBackend, metal_backend
from kvcache.state_memory import StateSegment
from kvcache.views import CacheTokens, KVViews, layer_regions
from tests.metal.graph import _standin
from tests.models import QWEN3_4B, write_config

PACKING = {"bits": 4, "group_size": 64, "mode": "affine"}
DTYPES = {"U32": mx.uint32, "BF16": mx.bfloat16}
PAGE_BYTES = 16384
MIB = 1 << 20
# Operations of MLX's that have no command of their own.
VIEWS = {"Broadcast", "Contiguous", "Reshape", "Slice", "Squeeze"}
# What MLX 0.32 has as one operation on a GPU, and as several on a CPU (mlx/fast.cpp, ops.cpp).
ONE_ON_A_GPU = "observed"
Arrays = list[tuple[int, int]]


@dataclass(frozen=True)
class Limits:
    """Of a command buffer: MLX gives it away behind the operation that passes one of them."""

    commands: int
    mib: int
    """Numbers, in units of 2**20, whatever bytes they have."""


MLX_LIMITS = Limits(50, 50)
"""Of MLX 0.32.4 on Max and Ultra chips; elsewhere both are 40 (mlx/backend/metal/device.cpp)."""


@dataclass(frozen=True)
class Operation:
    """An operation of a graph."""

    name: str
    commands: int
    reads: Arrays
    makes: Arrays


def step(
    folder: Path, tokens: int, layers: int = QWEN3_4B.num_hidden_layers, **fields: Any
) -> list[Operation]:
    """The operations that make one sequence's next token, which is its greatest logit.

    tokens: that are attended to. fields: of config.json, where it is another model.
    """
    spec_of_config = replace(QWEN3_4B, num_hidden_layers=layers)
    write_config(folder, spec_of_config, quantization=PACKING, **fields)
    config = ModelConfig(folder)
    spec = read_spec(config)
    forward = Forward(spec, operations(config, spec))
    with views_of(spec, tokens) as views, one_operation_each():
        states = forward.hidden(mx.array([1]), views, mx.array([0]))
        assert states is not None
        ends = views.step_end([forward.head(states).argmax(axis=-1)])
        graph = _standin.graph_behind(ends)
    several = {"decode_attention": 2 if tokens > 256 else 1, "gated_delta": 2}
    return [
        Operation(name, several.get(name, int(name not in VIEWS)), reads, makes)
        for name, reads, makes in graph
    ]


def operations(config: ModelConfig, spec: ModelSpec) -> MlxOps:
    """A model's, over weights of one number."""
    tensors = tensors_of(spec, embeds=False)
    weights = {
        name: mx.broadcast_to(mx.zeros((1,), DTYPES[its.dtype]), its.shape)
        for name, its in promised_tensors(config, tensors).items()
    }
    mx.eval(weights)
    made = MlxOps(spec, tensors, StoredWeights(weights, config.quantization))
    mx.eval(made.weights)
    return made


@contextmanager
def views_of(spec: ModelSpec, tokens: int) -> Iterator[KVViews]:
    """What a step sees that adds the last of so many tokens to one sequence, in sparse memory."""
    shape = spec.kv_shape(KVFormat.BFLOAT16, KVFormat.BFLOAT16)
    layout = paged_layout(
        shape, max_tokens=tokens, heap_bytes=1, system_page_bytes=PAGE_BYTES, page_bytes=PAGE_BYTES
    )
    backend = metal_backend("sparse", layout.groups[0], max_buffers=1, release_heaps=False)
    assert backend.add_buffer()
    for block in range(layout.blocks_for(tokens)):
        assert backend.add_heap()
        assert backend.map(0, block, block, 0, 1, writable=True)
    backend.finish_mappings()
    segments, states = [Segment(0, tokens - 1, 1)], None
    kept = CacheTokens(len(shape.layers), len(shape.states))
    mx.eval(kept.newest, kept.newest_states)  # as after any step
    rows = backend.rows(segments)
    if shape.cell is not None:
        assert isinstance(backend, MetalBackend)
        cells = backend.new_states(shape.cell, 1)
        states = cells.rows([StateSegment(1, None, ((1, 0),))], rows)
    views = KVViews(layer_regions(layout), kept, [rows], segments, 1, states)
    yield views
    views.cancel()
    assert backend.shut_down()


@contextmanager
def one_operation_each() -> Iterator[None]:
    """MLX's fast operations are one each, as on a GPU."""

    def normed(x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return _standin.observed(x, [weight])

    def numbers(weight: mx.array, *others: object, dtype: mx.Dtype) -> mx.array:
        return _standin.observed(mx.broadcast_to(WIDE, (len(weight), WIDE.size)), [weight])

    with (
        mock.patch.object(mx.fast, "rms_norm", normed),
        mock.patch.object(mx, "dequantize", numbers),
    ):
        yield


WIDE = mx.zeros((QWEN3_4B.hidden_size,), mx.bfloat16)


def of_a_layer(more: list[Operation], fewer: list[Operation]) -> Counter[str]:
    """What a step has of each operation in one layer more."""
    counted = Counter(its.name for its in more)
    counted.subtract(its.name for its in fewer)
    return +counted


def command_buffers(operations: list[Operation], limits: Limits) -> int:
    """How many MLX would give away, by the rule of its ``CommandEncoder::needs_commit``: behind an
    operation, where there are more commands than may be, or more numbers in all arrays that they
    use, each once (mlx/backend/metal/device.cpp, eval.cpp)."""
    buffers, commands, numbers = 1, 0, 0
    used: set[int] = set()
    lies_in: dict[int, int] = {}
    for its in operations:
        if its.name in VIEWS:
            lies_in |= {
                made: lies_in.get(its.reads[0][0], its.reads[0][0]) for made, _ in its.makes
            }
            continue
        if commands > limits.commands or numbers // MIB > limits.mib:
            buffers, commands, numbers, used = buffers + 1, 0, 0, set()
        commands += its.commands
        for number, elements in its.reads + its.makes:
            array = lies_in.get(number, number)
            if array not in used:
                used.add(array)
                numbers += elements
    return buffers
