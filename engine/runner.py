"""Runs plans on the model: one graph of MLX per step, for tokens or vectors."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Protocol

import mlx.core as mx

from engine.constraints import MaskThread
from engine.errors import EngineFailedError
from engine.pooling import pool
from engine.prompt_scores import joined, score, scored_rows
from engine.sampler import PendingSamples, sample
from engine.step_plan import PlanEntry, StepPlan
from engine.types import Sampled
from kvcache.backend import BackendFailedError
from kvcache.views import KVViews
from metal_ext import CpuWorkers

# How MLX begins what it says of a command buffer that the GPU did not finish.
GPU_FAULT = "[METAL] Command buffer execution failed"
# What Metal says then where a command has touched memory that is not there
# (MTLCommandBufferErrorPageFault).
PAGE_FAULTS = ("PageFault", "Address Fault")


class Model(Protocol):
    """A flat-token forward."""

    def hidden(
        self, token_ids: mx.array, positions: mx.array, views: KVViews, rows: mx.array | None
    ) -> mx.array | None:
        """Return the states of the given rows, ready for the head; with rows None only the cache is
        filled."""

    def head(self, states: mx.array) -> mx.array:
        """Their logits."""


class ViewSource(Protocol):
    """Where the runner gets its view of the cache."""

    def views(self, plan: SequenceOf[tuple[int, int, int]]) -> KVViews:
        """Return what a step reads and writes; opens the next epoch."""


class ModelStep:
    """A step whose graph is built."""

    def __init__(
        self,
        runner: "ModelRunner",
        views: KVViews,
        arrays: list[mx.array],
        results: Callable[[], list[Sampled]],
    ) -> None:
        """arrays: those whose evaluation is the step; then ``results`` can be called."""
        self._runner = runner
        self._views = views
        self._arrays = arrays
        self._results = results

    def submit(self) -> None:
        """Hands the device all of the graph; waits for room in MLX's queue."""
        with self._runner.cancelling(self._views):
            mx.async_eval(*self._arrays)  # type: ignore[no-untyped-call]

    def read(self) -> list[Sampled]:
        """Waits for the step, and reads what came of it."""
        with self._runner.cancelling(self._views):
            mx.eval(*self._arrays)
            results = self._results()
        self._runner.has_completed(self._views.epoch)
        return results

    def drop(self) -> None:
        """Nobody will read it; what was queued of it has run, or has failed."""
        self._views.cancel()
        self._runner.has_completed(self._views.epoch)


class ModelRunner:
    """Runs plans on the thread that owns MLX."""

    def __init__(
        self,
        model: Model,
        kv: ViewSource,
        *,
        pools: bool = False,
        workers: CpuWorkers | None = None,
    ) -> None:
        """pools: whether the model makes vectors and no tokens. workers: a CPU's."""
        self._model = model
        self._pools = pools
        self._kv = kv
        self._workers = workers
        self._mask_thread = MaskThread()
        self._newest = mx.array([0])
        """Tokens of the newest step, on the device."""
        self._rows: dict[int, int] = {}
        """Whose they are."""
        self.completed_epoch = 0

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> ModelStep:
        """Build the graph of the plan's rows. overlapped: its beginning is submitted at once, and
        tokens that are not known yet are those of the step before.

        Raises EngineFailedError where the device is lost, BackendFailedError where what is mapped
        is not what it should be.
        """
        entries = plan.entries
        views = self._kv.views([(e.sequence.seq_id, e.start, e.count) for e in entries])
        with self.cancelling(views):
            step = self._build(entries, views)
            if overlapped:
                mx.async_eval(views.first_rows)  # type: ignore[no-untyped-call]
        return step

    def has_completed(self, epoch: int) -> None:
        """Note that all steps up to that epoch have ended."""
        self.completed_epoch = max(self.completed_epoch, epoch)

    def release_cache(self) -> None:
        """Release memory that MLX keeps for its next arrays."""
        mx.clear_cache()

    @contextmanager
    def cancelling(self, views: KVViews) -> Iterator[None]:
        """Cancel the step on an error. First wait for what was queued: it may still run. Where
        waiting fails, or the fault is the GPU's own, nobody knows what runs: the step never
        completes. Raises EngineFailedError then, and BackendFailedError on a page fault."""
        try:
            yield
        except Exception as error:
            message = str(error)
            if GPU_FAULT in message and any(words in message for words in PAGE_FAULTS):
                what = f"a step met memory that is not mapped: {message}"
                raise BackendFailedError(what) from error
            try:
                mx.synchronize()
            except Exception as lost:
                raise EngineFailedError("the device is lost") from lost
            if GPU_FAULT in message:
                raise EngineFailedError("the device has failed") from error
            views.cancel()
            self.has_completed(views.epoch)
            raise

    # --- the graph ------------------------------------------------------------------------------

    def _build(self, entries: list[PlanEntry], views: KVViews) -> ModelStep:
        tokens, positions, rows = self._batch(entries)
        scored = scored_rows(entries) if any(entry.scores for entry in entries) else []
        output_rows = mx.array(rows + scored) if rows or scored else None
        states = self._model.hidden(tokens, mx.array(positions), views, output_rows)
        if states is None:
            self._rows = {}
            return ModelStep(self, views, views.step_end([]), list)
        if not scored:
            pending = self._choose(entries, states)
            return ModelStep(self, views, views.step_end(pending.arrays), pending.read)
        last, inner = states[: len(rows)], states[len(rows) :]
        pending = self._choose(entries, last)

        def results() -> list[Sampled]:
            return joined(entries, pending.read(), score(self._model.head, inner, entries))

        return ModelStep(self, views, views.step_end([*pending.arrays, inner]), results)

    def _batch(self, entries: list[PlanEntry]) -> tuple[mx.array, list[int], list[int]]:
        """Return the flat tokens, their positions, and the rows that sample."""
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        coming: list[tuple[int, int]] = []
        for entry in entries:
            sequence, end = entry.sequence, entry.start + entry.count
            if entry.start == len(sequence.token_ids):
                coming.append((len(tokens), self._rows[sequence.seq_id]))
                tokens.append(0)
            else:
                tokens += sequence.token_ids[entry.start : end]
            positions += range(entry.start, end)
            if entry.samples:
                rows.append(len(tokens) - 1)
        return self._tokens(tokens, coming), positions, rows

    def _tokens(self, known: list[int], coming: list[tuple[int, int]]) -> mx.array:
        """Return the flat tokens on the device. coming: places whose token is the newest step's of
        that row."""
        if not coming:
            return mx.array(known)
        if len(known) == self._newest.size and all(place == row for place, row in coming):
            return self._newest  # all go on, in their order
        places = list(range(len(known)))
        for place, row in coming:
            places[place] = len(known) + row
        known_ids = mx.array(known, dtype=mx.int32)
        return mx.concatenate([known_ids, self._newest])[mx.array(places)]

    def _choose(self, entries: list[PlanEntry], states: mx.array) -> PendingSamples:
        """Return the results of the entries that sample. states: of their last tokens."""
        sampling = [entry for entry in entries if entry.samples]
        self._rows = {entry.sequence.seq_id: row for row, entry in enumerate(sampling)}
        sequences = [entry.sequence for entry in sampling]
        if not sequences:
            return PendingSamples([], list)
        if self._pools:
            return pool(states, sequences)
        drawn = [entry.start + entry.count - entry.sequence.num_prompt for entry in sampling]
        logits = self._model.head(states)
        pending = sample(logits, sequences, self._mask_thread, self._workers, drawn)
        self._newest = pending.arrays[0].astype(mx.int32)
        return pending
