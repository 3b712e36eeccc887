"""What a step of decoding costs the host, pinned: Qwen3-4B in four bits, one sequence; and what a
layer of a hybrid with heads like Qwen3.5-4B's does."""

from pathlib import Path

import mlx.core as mx
import pytest

import metal_ext
from metal_ext.environment import LARGER_BUFFERS
from tests.engine.models.hybrids import FIELDS
from tests.metal.graph import _standin
from tests.metal.graph.stage import Shape, Stage
from tests.metal.graph.step_counts import (
    MLX_LIMITS,
    Limits,
    Operation,
    command_buffers,
    of_a_layer,
    step,
)

LARGER = Limits(*map(int, LARGER_BUFFERS.values()))
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


@pytest.mark.parametrize(
    ("tokens", "a_layer", "commands", "buffers"),
    [(256, 14, 513, (13, 7)), (257, 15, 549, (13, 7))],
)
def test_a_step_is_so_many_operations_and_commands(
    tokens: int,
    a_layer: int,
    commands: int,
    buffers: tuple[int, int],
    tmp_path: Path,
    report: list[str],
) -> None:
    whole, shorter = step(tmp_path, tokens), step(tmp_path, tokens, LAYERS - 1)
    names = of_a_layer(whole, shorter)
    of_one = sum(its.commands for its in whole) - sum(its.commands for its in shorter)
    all_commands = sum(its.commands for its in whole)
    given_away = (command_buffers(whole, MLX_LIMITS), command_buffers(whole, LARGER))
    report.append(
        f"Qwen3-4B in 4 bits, one sequence of {tokens} tokens: {of_one} commands and "
        f"{names.total()} operations a layer, {all_commands} and {len(whole)} a step; "
        f"{given_away[0]} command buffers by MLX's own limits, {given_away[1]} by ours"
    )
    assert names == LAYER
    assert (of_one, all_commands, given_away) == (a_layer, commands, buffers)


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


def test_a_recurrent_layer_is_so_many_operations_and_commands(
    tmp_path: Path, report: list[str]
) -> None:
    whole, shorter = (step(tmp_path, 200, layers, **HYBRID) for layers in (6, 5))
    names = of_a_layer(whole, shorter)
    of_one = sum(its.commands for its in whole) - sum(its.commands for its in shorter)
    report.append(f"a recurrent layer in 4 bits: {of_one} commands and {names.total()} operations")
    assert names == RECURRENT_LAYER
    assert of_one == 15


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


def test_a_command_buffer_ends_behind_what_passes_a_limit() -> None:
    many = [Operation("Add", 1, [(0, 1)], [(n, 1)]) for n in range(1, 7)]
    assert [command_buffers(many[:n], Limits(2, 9)) for n in (3, 4, 6)] == [1, 2, 2]
    large = [Operation("Add", 1, [(9, 2 << 20)], [(n, 2 << 20)]) for n in range(1, 5)]
    assert command_buffers(large, Limits(9, 5)) == 2
    view = [Operation("Reshape", 0, [(9, 2 << 20)], [(8, 2 << 20)])]
    again = [Operation("Add", 1, [(8, 2 << 20)], [(7, 1)])]
    assert command_buffers(large[:1] + view + again * 9, Limits(99, 4)) == 1
