"""Gives the layers of a model access to K and V during one step: to append rows, and to attend."""

from collections.abc import Sequence

import mlx.core as mx

import metal_ext
from kvcache.backends.backend import LayerRegions, Segment, StateRows, StepRows
from kvcache.hidden import HiddenStates
from kvcache.layout import KVLayout
from kvcache.replay import DraftInputs, Replay
from metal_ext import GatedDelta, QKTransform, Softmax


class OrderingHandles:
    """The newest ordering handle of every layer: an array that makes reads wait for earlier writes.
    The handles live as long as the engine, which keeps all steps in order."""

    def __init__(self, num_layers: int, num_states: int = 0) -> None:
        self.newest: list[mx.array] = [mx.zeros((1,)) for _ in range(num_layers)]
        self.newest_states: list[mx.array] = [mx.zeros((1,)) for _ in range(num_states)]

    def restart(self) -> None:
        """Replace all handles, so that later operations do not depend on failed ones."""
        self.newest = [mx.zeros((1,)) for _ in self.newest]
        self.newest_states = [mx.zeros((1,)) for _ in self.newest_states]


class KVViews:
    """The K and V of one step in all layers. Row i belongs to token i of the step. Sequences with
    one row, or with drafts, come first. The rows of every other sequence are a chunk."""

    def __init__(
        self,
        layers: Sequence[LayerRegions],
        order: OrderingHandles,
        counts: Sequence[int],
        epoch: int,
    ) -> None:
        """``counts`` are the numbers of rows of the step's sequences; a sequence with drafts counts
        as one sequence per row. ``epoch`` is the step's number."""
        self.epoch = epoch
        self.segments: tuple[Segment, ...] = ()
        """The places of the step's rows in the buffers of the first group of layers."""
        self.rows: list[StepRows] = []
        """One item per group of layers that keeps K and V."""
        self.states: StateRows | None = None
        self.replay: Replay | None = None
        """Set if sequences have kept drafts of which no state is written yet."""
        self.draft_inputs: DraftInputs | None = None
        """Set if the step has drafts, and the model recurrent layers."""
        self.hidden: HiddenStates | None = None
        """Set if the model has a head for drafts."""
        self._layers = layers
        self._order = order
        self._decode_rows = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        self._chunks = list(counts[self._decode_rows :])

    def add(self, rows: StepRows, segments: Sequence[Segment]) -> None:
        """Add the rows of the next group of layers, and their places in its buffers."""
        self.segments = self.segments or tuple(segments)
        self.rows.append(rows)

    def append(
        self,
        layer: int,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        transform: QKTransform | None,
    ) -> mx.array:
        """Apply ``transform`` to queries and keys, store keys and values; return the queries."""
        regions = self._layers[layer]
        self._order.newest[layer], queries = self.rows[regions.group].append(
            self._order.newest[layer], regions, queries, keys, values, transform
        )
        return queries

    def attend(self, layer: int, queries: mx.array, softmax: Softmax) -> mx.array:
        """Return the attention of queries ``[T, query_heads, head_dim]``. Each row attends to its
        sequence's tokens, up to and including itself, of which a window may hide the first."""
        order, regions = self._order.newest[layer], self._layers[layer]
        rows = self.rows[regions.group]
        split = self._decode_rows
        parts: list[mx.array] = []
        if split:
            decoding = queries[:split] if self._chunks else queries
            parts.append(rows.decode_attention(order, regions, decoding, softmax))
        start = split
        for number, count in enumerate(self._chunks, split):
            chunk = queries[start : start + count] if len(queries) != count else queries
            parts.append(rows.chunk_attention(order, regions, chunk, number, softmax))
            start += count
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def recur(
        self, number: int, qkv: mx.array, z: mx.array, a: mx.array, b: mx.array, delta: GatedDelta
    ) -> mx.array:
        """Advance the states of recurrent layer ``number`` by this step's rows; return the layer's
        output."""
        assert self.states is not None, "the cache keeps no states"
        tokens = self._order.newest_states
        inputs = qkv, z, a, b
        if self.draft_inputs is not None:
            self.draft_inputs.add(number, inputs)
        if self.replay is not None:
            qkv, z, a, b = self.replay.extend(number, inputs)
        tokens[number], output = self.states.recur(tokens[number], number, qkv, z, a, b, delta)
        return output if self.replay is None else self.replay.own_rows(output)

    def shift(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """See HiddenStates.shift."""
        assert self.hidden is not None, "the cache keeps no hidden states"
        return self.hidden.shift(states)

    def step_end(self, results: list[mx.array]) -> list[mx.array]:
        """Return the arrays to evaluate for the results and for all appends of the step."""
        arrays = results + self._order.newest + self._order.newest_states
        if self.draft_inputs is not None:
            arrays += self.draft_inputs.arrays
        if self.hidden is not None:
            arrays += self.hidden.arrays
        for rows in self.rows:
            arrays = rows.end(arrays)
        return arrays

    @property
    def first_rows(self) -> mx.array:
        """An array that depends on all operations before the first attention. A CPU runs them while
        the last step's results are read. Starting more would block, because MLX's queue is full."""
        return self._order.newest[0]

    def cancel(self) -> None:
        """Cancel a failed step. The step's appends must not run later, when memory may be gone."""
        self._order.restart()
        for rows in self.rows:
            rows.cancel()


def layer_regions(layout: KVLayout) -> list[LayerRegions]:
    regions = []
    for layer, spec in enumerate(layout.shape.layers):
        group, keys = layout.places[layer]
        dtype: mx.Dtype = getattr(mx, spec.format.value)
        native = metal_ext.Layer(keys, keys + 1, dtype)
        regions.append(
            LayerRegions(group, keys, keys + 1, spec.kv_heads, spec.head_dim, dtype, native)
        )
    return regions
