"""Plan and cache -> tokens, or vectors: one evaluation of MLX per step."""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import mlx.core as mx

from engine.constraints import MaskThread
from engine.errors import EngineFailedError
from engine.pooling import pool
from engine.prompt_scores import joined, score, scored_rows
from engine.sampler import sample
from engine.step_plan import PlanEntry, StepPlan
from engine.types import Sampled
from kvcache.views import KVViews

# How MLX begins what it says of a command buffer that the GPU did not finish.
GPU_FAULT = "[METAL] Command buffer execution failed"


class Model(Protocol):
    """A flat-token forward."""

    def hidden(
        self, token_ids: mx.array, positions: mx.array, views: KVViews, rows: mx.array | None
    ) -> mx.array | None:
        """States of the given rows, ready for the head; with rows None only the cache is filled."""

    def head(self, states: mx.array) -> mx.array:
        """Their logits."""


class ViewSource(Protocol):
    """Where the runner gets its view of the cache."""

    def views(self, plan: SequenceOf[tuple[int, int, int]]) -> KVViews:
        """What a step reads and writes; opens the next epoch."""


class ModelRunner:
    """Runs plans on the thread that owns MLX."""

    def __init__(self, model: Model, kv: ViewSource, *, pools: bool = False) -> None:
        """pools: whether what is wanted of the model are vectors, not tokens."""
        self._model = model
        self._pools = pools
        self._kv = kv
        self._mask_thread = MaskThread()
        self.completed_epoch = 0

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Computes the plan's rows; one result for each entry that has one, in order.

        Raises EngineFailedError where the device is lost.
        """
        entries = plan.entries
        views = self._kv.views([(e.sequence.seq_id, e.start, e.count) for e in entries])
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for entry in entries:
            end = entry.start + entry.count
            tokens += entry.sequence.token_ids[entry.start : end]
            positions += range(entry.start, end)
            if entry.samples:
                rows.append(len(tokens) - 1)
        try:
            results = self._evaluate(entries, views, (tokens, positions, rows))
        except Exception as error:
            self._give_up(views, error)
            raise
        self.completed_epoch = views.epoch
        return results

    def free_cache(self) -> None:
        """Memory that MLX keeps for its next arrays goes back to the system."""
        mx.clear_cache()

    def _give_up(self, views: KVViews, error: Exception) -> None:
        """What was queued before a fault may still run. Where even waiting for it fails, or where
        the fault is the GPU's own, nobody knows what runs, and the step is never complete."""
        try:
            mx.synchronize()
        except Exception as lost:
            raise EngineFailedError("the device is lost") from lost
        if GPU_FAULT in str(error):
            raise EngineFailedError("the device has failed") from error
        views.give_up()
        self.completed_epoch = views.epoch

    def _evaluate(
        self,
        entries: list[PlanEntry],
        views: KVViews,
        batch: tuple[list[int], list[int], list[int]],
    ) -> list[Sampled]:
        """batch: tokens, their positions, and the rows that sample."""
        tokens, positions, rows = batch
        scored = scored_rows(entries) if any(entry.scores for entry in entries) else []
        wanted = mx.array(rows + scored) if rows or scored else None
        states = self._model.hidden(mx.array(tokens), mx.array(positions), views, wanted)
        if states is None:
            mx.eval(views.step_end([]))
            return []
        if not scored:
            return self._sample(entries, views, states)
        last, inner = states[: len(rows)], states[len(rows) :]
        sampled = self._sample(entries, views, last, inner)
        return joined(entries, sampled, score(self._model.head, inner, entries))

    def _sample(
        self, entries: list[PlanEntry], views: KVViews, states: mx.array, *others: mx.array
    ) -> list[Sampled]:
        """Ends the step with the results of the entries that sample. others: what is to be
        evaluated with them."""
        sequences = [entry.sequence for entry in entries if entry.samples]
        if not sequences:
            mx.eval(views.step_end([*others]))
            return []
        if self._pools:
            pending = pool(states, sequences)
        else:
            pending = sample(self._model.head(states), sequences, self._mask_thread)
        mx.eval(views.step_end([*pending.arrays, *others]))
        return pending.read()
