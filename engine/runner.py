"""Plan and cache -> sampled tokens: one evaluation of MLX per step."""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import mlx.core as mx

from engine.sampler import sample
from engine.step_plan import StepPlan
from engine.types import Sampled
from kvcache.views import KVViews


class Model(Protocol):
    """A flat-token forward."""

    def __call__(
        self, token_ids: mx.array, positions: mx.array, views: KVViews, rows: mx.array | None
    ) -> mx.array | None:
        """Logits of the given rows; with rows None only the cache is filled."""


class ViewSource(Protocol):
    """Where the runner gets its view of the cache."""

    def views(self, plan: SequenceOf[tuple[int, int, int]]) -> KVViews:
        """What a step reads and writes; opens the next epoch."""


class ModelRunner:
    """Runs plans on the thread that owns MLX."""

    def __init__(self, model: Model, kv: ViewSource) -> None:
        self._model = model
        self._kv = kv
        self.completed_epoch = 0

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Computes the plan's rows; one result for each entry that samples, in order."""
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
            samples = self._evaluate(plan, views, tokens, positions, rows)
        except Exception:
            # What was queued before the fault may still run. Where even waiting for it fails, the
            # device is lost, and the step is never said to be complete.
            mx.synchronize()
            views.give_up()
            self.completed_epoch = views.epoch
            raise
        self.completed_epoch = views.epoch
        return samples

    def _evaluate(
        self,
        plan: StepPlan,
        views: KVViews,
        tokens: list[int],
        positions: list[int],
        rows: list[int],
    ) -> list[Sampled]:
        logits = self._model(
            mx.array(tokens), mx.array(positions), views, mx.array(rows) if rows else None
        )
        if logits is None:
            mx.eval(views.step_end([]))
            return []
        samples = sample(logits, [entry.sequence for entry in plan.entries if entry.samples])
        mx.eval(views.step_end(samples.arrays))
        return samples.read()
