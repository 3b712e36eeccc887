"""What Ray is told to have."""

from types import SimpleNamespace

from server.cluster.ray_scaling import policy
from server.cluster.scaling import Need


def context(said: dict[str, Need], target: int, running: int) -> SimpleNamespace:
    figures: dict[str, dict[str, float]] = {}
    for replica, need in said.items():
        for name, value in need.figures().items():
            figures.setdefault(name, {})[replica] = value
    return SimpleNamespace(
        target_num_replicas=target, current_num_replicas=running, aggregated_metrics=figures
    )


def test_a_crowd_wants_one_more() -> None:
    assert policy(context({"a": Need(3.0, 1.0, 0.5)}, 1, 1)) == (2, {})


def test_while_one_comes_or_goes_nothing_else_does() -> None:
    assert policy(context({"a": Need(3.0, 1.0, 0.5)}, 2, 1)) == (2, {})


def test_without_a_word_nothing_changes() -> None:
    said = SimpleNamespace(target_num_replicas=2, current_num_replicas=2, aggregated_metrics=None)
    assert policy(said) == (2, {})
