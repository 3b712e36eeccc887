"""What is kept resident, and for how long."""

import mlx.core as mx
import pytest

from tests.metal.graph import _standin
from tests.metal.graph.stage import KINDS, Stage


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
