"""Mixtures of experts as MLX has them: a GPU's."""

from collections.abc import Callable

import mlx.core as mx

from engine.models.spec import Experts
from engine.models.stored import StoredMatrix

# From so many pairs of a row and an expert on they are sorted by experts, so that an expert's rows
# are multiplied together. As in mlx-lm (models/switch_layers.py).
LEAST_SORTED_PAIRS = 64

Gate = Callable[[mx.array, mx.array], mx.array]
"""``silu(gates) * up``."""


def route(logits: mx.array, its: Experts) -> tuple[mx.array, mx.array]:
    """Return experts and their weights ``[T, chosen]`` of logits ``[T, experts]``, the best ones
    first.

    Of experts with equal shares the first ones are taken: sorting is stable. mlx-lm's argpartition
    does not say which it takes.
    """
    shares = mx.softmax(logits, axis=-1, precise=True)
    experts = mx.argsort(-shares, axis=-1)[:, : its.chosen]
    weights = mx.take_along_axis(shares, experts, axis=-1)
    if its.normalised:
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
    return experts, weights


def mix(
    x: mx.array,
    experts: mx.array,
    weights: mx.array,
    gate_up: list[StoredMatrix],
    down: StoredMatrix,
    gate: Gate,
) -> mx.array:
    """Return the weighted sums ``[T, hidden]`` of what the experts make of rows x.

    experts, weights: ``[T, chosen]``. gate_up: of all experts; two stacks, or one of both.
    """
    rows, chosen = experts.shape
    numbers, order = experts.flatten(), None
    pairs = mx.arange(rows * chosen) // chosen
    if ordered := numbers.size >= LEAST_SORTED_PAIRS:
        order = mx.argsort(numbers)
        numbers, pairs = numbers[order], pairs[order]
    given = x[pairs]
    both = [_multiply(given, its, numbers, ordered=ordered) for its in gate_up]
    gates, up = both if len(both) == 2 else mx.split(both[0], 2, axis=-1)
    made = _multiply(gate(gates, up), down, numbers, ordered=ordered)
    if order is not None:
        made = made[mx.argsort(order)]
    parts = made.reshape(rows, chosen, -1) * weights[..., None]
    return parts.sum(axis=-2).astype(made.dtype)


def _multiply(x: mx.array, its: StoredMatrix, experts: mx.array, *, ordered: bool) -> mx.array:
    """Return every row of x ``[P, inputs]`` times the matrix of its own expert, ``[P, outputs]``.

    ordered: whether experts ``[P]`` rise.
    """
    rows = x[:, None]
    if its.packing is None:
        stack = its.weight.swapaxes(-1, -2)
        return mx.gather_mm(rows, stack, rhs_indices=experts, sorted_indices=ordered)[:, 0]
    assert its.scales is not None
    return mx.gather_qmm(
        rows,
        its.weight,
        its.scales,
        its.biases,
        rhs_indices=experts,
        transpose=True,
        group_size=its.packing.group_size,
        bits=its.packing.bits,
        mode=its.packing.mode,
        sorted_indices=ordered,
    )[:, 0]
