"""Applies kept drafts to recurrent states one step later.

A step computes the outputs of drafts, but writes no state after them, because it may reject them.
The next step puts the inputs of the kept ones before its own rows::

    step n      | token | draft | draft | draft |    writes the state after the token
    kept                | draft | draft |
    step n + 1          | draft | draft | token |    writes the state after the token
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

Inputs = Sequence[mx.array]
"""The inputs of a recurrent layer: arrays with a row for each token."""


class DraftInputs:
    """The inputs of each recurrent layer for the drafts of a step."""

    def __init__(self, rows: list[int]) -> None:
        """``rows`` are the drafts' indices among the step's rows."""
        self._rows = mx.array(rows)
        self.by_layer: dict[int, list[mx.array]] = {}

    def add(self, layer: int, inputs: Inputs) -> None:
        self.by_layer[layer] = [array[self._rows] for array in inputs]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for inputs in self.by_layer.values() for array in inputs]


class KeptDrafts(NamedTuple):
    """A sequence's drafts that a step has kept."""

    inputs: DraftInputs
    first: int
    """The index of the sequence's first draft among the drafts of ``inputs``."""
    count: int  # type: ignore[assignment]  # hides tuple.count


class Replay:
    """Puts kept drafts before the rows of their sequences."""

    def __init__(self, kept: Sequence[KeptDrafts | None], counts: Sequence[int]) -> None:
        """``kept`` and ``counts`` have an item per sequence of the step: its kept drafts, and the
        number of its own rows."""
        self._sources = list({id(each.inputs): each.inputs for each in kept if each}.values())
        starts, start = {}, sum(counts)
        for source in self._sources:
            starts[id(source)] = start
            start += len(source.by_layer[0][0])
        rows: list[int] = []
        own: list[int] = []
        for each, count in zip(kept, counts, strict=True):
            if each is not None:
                first = starts[id(each.inputs)] + each.first
                rows += range(first, first + each.count)
            own += range(len(rows), len(rows) + count)
            rows += range(len(own) - count, len(own))
        self._rows, self._own = mx.array(rows), mx.array(own)

    def extend(self, layer: int, inputs: Inputs) -> list[mx.array]:
        kept = zip(*(source.by_layer[layer] for source in self._sources), strict=True)
        return [
            mx.concatenate([own, *more])[self._rows] for own, more in zip(inputs, kept, strict=True)
        ]

    def own_rows(self, output: mx.array) -> mx.array:
        return output[self._own]
