"""What is kept resident for whom, and when it is asked for."""

import time

import mlx.core as mx
import pytest

from tests.metal.graph import _standin
from tests.metal.graph.stage import KINDS, WAIT_S, Stage

LAPSES_S = 0.5  # Residency::kInterval


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_held_once_each_wherever_they_lie(kind: str) -> None:
    weights = [mx.random.normal((64, 64)) for _ in range(5)]
    mx.eval(weights)
    stage = Stage(kind)
    before = _standin.residency()["buffers"]
    stage.kv_backend.hold([*weights, weights[0], mx.zeros((0,))])
    heaps = {"sparse": 0, "paged": 2, "dense": 1}[kind]  # that are buffers, or slices of one
    assert _standin.residency()["buffers"] == before + len(weights) + heaps
    with pytest.raises(RuntimeError, match="resident already"):
        stage.kv_backend.hold(weights)
    stage.step((stage.open(64), 5))
    stage.end()
    assert _standin.residency()["buffers"] == before


def test_what_is_not_evaluated_cannot_be_held() -> None:
    stage = Stage("sparse")
    with pytest.raises(ValueError, match="evaluated"):
        stage.kv_backend.hold([mx.zeros((4,)) + 1])
    stage.end()


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_pause_everything_is_asked_for_before_a_step_has_a_command(kind: str) -> None:
    weights = mx.ones((64, 64))
    mx.eval(weights)
    stage = Stage(kind)
    stage.kv_backend.hold([weights])
    one = stage.open(64)
    stage.step((one, 5))
    time.sleep(1.5 * LAPSES_S)
    before, commands = _standin.residency()["requests"], _standin.counts()["commands"]
    rows = stage.rows((one, 1))
    assert _standin.counts()["commands"] == commands
    sets = 2  # of weights, and of rows
    assert _standin.residency()["requests"] >= before + sets
    stage.kv_backend.abandon(rows)
    stage.end()


def test_between_steps_a_thread_asks_again_while_python_computes() -> None:
    stage = Stage("sparse", keep_s=60.0)
    stage.step((stage.open(64), 5))
    wanted, end = _standin.residency()["requests"] + 3, time.monotonic() + WAIT_S
    while _standin.residency()["requests"] < wanted:
        assert time.monotonic() < end
    stage.end()
