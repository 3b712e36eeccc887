"""What a step of decoding costs the host, pinned: Qwen3-4B in four bits, one sequence; and what a
layer of a hybrid with heads like Qwen3.5-4B's does.

Counted in the graph that the engine's own forward makes of the whole model. Nothing of it is
evaluated, and its weights are one number each, so that it needs no memory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

import metal_ext
from engine.models.checkpoint import promised_tensors, tensors_of
from engine.models.config import ModelConfig
from engine.models.families import read_spec
from engine.models.forward import Forward
from engine.models.mlx_ops import MlxOps
from engine.models.spec import ModelSpec
from engine.models.stored import StoredWeights
from kvcache.backend import Segment
from kvcache.layout import KVFormat, paged_layout
from kvcache.metal_backend import MetalBackend
from kvcache.slot_pool import StateSegment
from kvcache.views import KVViews, OrderingHandles, layer_regions
from tests.engine.models.hybrids import FIELDS
from tests.metal.graph import _standin
from tests.metal.graph.stage import PAGE, Shape, Stage
from tests.models import QWEN3_4B, write_config

PACKING = {"bits": 4, "group_size": 64, "mode": "affine"}
DTYPES = {"U32": mx.uint32, "BF16": mx.bfloat16}
# Operations of MLX's that have no command of their own.
VIEWS = {"Broadcast", "Contiguous", "Reshape", "Slice", "Squeeze"}
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
HYBRID = FIELDS | {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
RECURRENT_LAYER = {
    "QuantizedMatmul": 8,
    "observed": 2,  # norms
    "Reshape": 1,
    "Add": 2,
    "gated_delta": 1,
    "swiglu": 1,
}
WIDE = mx.zeros((QWEN3_4B.hidden_size,), mx.bfloat16)


def step(folder: Path, tokens: int, layers: int = LAYERS, **fields: Any) -> list[str]:
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
        return _standin.operations_behind(ends)


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
        shape, max_tokens=tokens, heap_bytes=1, system_page_bytes=PAGE, page_bytes=PAGE
    )
    backend = MetalBackend("sparse", layout.groups[0], max_buffers=1, release_heaps=False)
    assert backend.add_buffer()
    for block in range(layout.blocks_for(tokens)):
        assert backend.add_heap()
        assert backend.map(0, block, block, 0, 1, writable=True)
    backend.finish_mappings()
    segments, states = [Segment(0, tokens - 1, 1)], None
    kept = OrderingHandles(len(shape.layers), len(shape.states))
    mx.eval(kept.newest, kept.newest_states)  # as after any step
    rows = backend.rows(segments)
    if shape.slot is not None:
        assert isinstance(backend, MetalBackend)
        slots = backend.new_states(shape.slot, 1)
        states = slots.rows([StateSegment(1, None, ((1, 0),))], rows)
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

    def numbers(weight: mx.array, *others: object, dtype: mx.Dtype) -> mx.array:
        return _standin.observed(mx.broadcast_to(WIDE, (len(weight), WIDE.size)), [weight])

    with (
        mock.patch.object(mx.fast, "rms_norm", normed),
        mock.patch.object(mx, "dequantize", numbers),
    ):
        yield


def commands(names: Sequence[str], tokens: int) -> int:
    """How many commands the operations of a step over so many tokens have."""
    several = {"decode_attention": 2 if tokens > 256 else 1, "gated_delta": 2}
    return sum(several.get(name, int(name not in VIEWS)) for name in names)


@pytest.mark.parametrize(("tokens", "a_layer", "a_step"), [(256, 14, 513), (257, 15, 549)])
def test_a_step_is_so_many_operations_and_commands(
    tokens: int, a_layer: int, a_step: int, tmp_path: Path, report: list[str]
) -> None:
    whole, shorter = step(tmp_path, tokens), step(tmp_path, tokens, LAYERS - 1)
    names = Counter(whole) - Counter(shorter)
    report.append(
        f"Qwen3-4B in 4 bits, one sequence of {tokens} tokens: {a_layer} commands and "
        f"{names.total()} operations a layer, {a_step} and {len(whole)} a step"
    )
    assert names == LAYER
    assert commands(whole, tokens) == a_step
    assert commands(whole, tokens) - commands(shorter, tokens) == a_layer


def test_a_recurrent_layer_is_so_many_operations_and_commands(tmp_path: Path) -> None:
    whole, shorter = (step(tmp_path, 200, layers, **HYBRID) for layers in (6, 5))
    names = Counter(whole) - Counter(shorter)
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
