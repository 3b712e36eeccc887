"""Runs plans on the model: builds one MLX graph per step."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import mlx.core as mx

from engine.machine import release_free_memory
from engine.step.plan import (
    InFlightStep,
    Outcome,
    PendingState,
    PendingToken,
    PlanEntry,
    SamplingState,
    StepPlan,
)
from engine.step.sampler import PendingSamples, joined, pool, sample, score, scored_rows
from engine.types import EngineFailedError
from kvcache.backends.backend import BackendFailedError
from kvcache.backends.faults import GPUFailure
from kvcache.manager import KVCacheManager
from kvcache.views import KVViews
from metal_ext import CpuWorkers

# The beginning of MLX's error message for a command buffer that the GPU did not finish.
GPU_FAULT = "[METAL] Command buffer execution failed"
NO_SAMPLES = PendingSamples([], list)


class Model(Protocol):
    """Runs a model's forward pass. The class Forward (engine/models) implements this."""

    def hidden(
        self, token_ids: mx.array, views: KVViews, rows: mx.array | None
    ) -> mx.array | None: ...

    def head(self, states: mx.array) -> mx.array: ...


class ModelStep:
    """A step whose MLX graph is built up to the logits, or further up to the sampled tokens."""

    def __init__(
        self,
        runner: "ModelRunner",
        plan: StepPlan,
        views: KVViews,
        output: PendingSamples | mx.array,
        scored_states: mx.array | None,
    ) -> None:
        """``output`` is the samples, or the logits if sampling must wait for a SamplingState."""
        self._runner = runner
        self._plan = plan
        self._views = views
        self._output = output
        self._scored_states = scored_states
        outputs = output.arrays if isinstance(output, PendingSamples) else [output]
        scored = [] if scored_states is None else [scored_states]
        self._arrays = views.step_end([*outputs, *scored])
        self._unsubmitted = self._arrays

    def submit_graph(self) -> None:
        """Submit the built part of the graph to the device; wait for room in MLX's queue."""
        if self._unsubmitted:
            mx.async_eval(*self._unsubmitted)  # type: ignore[no-untyped-call]
            self._unsubmitted = []

    def submit(self, state: PendingState | None) -> None:
        with self._runner.cancelling(self._views):
            self.submit_graph()
            if not isinstance(self._output, PendingSamples):
                assert state is not None, "the plan needs a state"
                self._output = self._runner.sample(self._plan, self._output, state.result())
                self._unsubmitted = self._output.arrays
                self._arrays = [*self._arrays, *self._unsubmitted]
                self.submit_graph()

    def read(self) -> SequenceOf[Outcome]:
        with self._runner.cancelling(self._views):
            assert isinstance(self._output, PendingSamples), "a step is submitted before it is read"
            mx.eval(*self._arrays)
            outcomes = self._outcomes(self._output.read())
        self._runner.has_completed(self._views.epoch)
        return outcomes

    def _outcomes(self, sampled: SequenceOf[Outcome]) -> SequenceOf[Outcome]:
        states, entries = self._scored_states, self._plan.entries
        scored = [] if states is None else score(self._runner.head, states, entries)
        return joined(entries, sampled, scored)

    def cancel(self) -> None:
        self._views.cancel()
        self._runner.has_completed(self._views.epoch)


class ModelRunner:
    """Runs the plans of steps on a model. Use a runner only on the thread that owns MLX."""

    def __init__(
        self,
        model: Model,
        kv: KVCacheManager,
        *,
        pools: bool = False,
        workers: CpuWorkers | None = None,
        takes_whole_steps: bool = False,
    ) -> None:
        """With ``pools``, the model makes vectors instead of tokens. ``workers`` is None on a GPU.
        With ``takes_whole_steps``, MLX's queue has room for a second step, as on a GPU. A CPU's
        queue has room for little more than one layer of the model."""
        self._model = model
        self._takes_whole_steps = takes_whole_steps
        self._pools = pools
        self._kv = kv
        self._workers = workers
        self._sampled = mx.array([0])
        self._sampled_by = 0
        """The number of the step that sampled ``_sampled``."""
        self.completed_epoch = 0

    def head(self, states: mx.array) -> mx.array:
        return self._model.head(states)

    def begin(self, plan: StepPlan, *, overlapped: bool = False) -> InFlightStep:
        views = self._kv.views(plan.segments, plan.drafts)
        with self.cancelling(views):
            step = self._build(plan, views)
            if self._takes_whole_steps:
                step.submit_graph()
            elif overlapped:
                mx.async_eval(views.first_rows)  # type: ignore[no-untyped-call]
        return step

    def has_completed(self, epoch: int) -> None:
        self.completed_epoch = max(self.completed_epoch, epoch)

    def release_cache(self) -> None:
        """Free the memory that MLX and the C library keep for later arrays."""
        mx.clear_cache()
        release_free_memory()

    def cancelling(self, views: KVViews) -> AbstractContextManager[None]:
        return cancelling([views], self.has_completed)

    def _build(self, plan: StepPlan, views: KVViews) -> ModelStep:
        tokens, rows = self._batch(plan.entries)
        scored = scored_rows(plan.entries)
        output_rows = mx.array(rows + scored) if rows or scored else None
        states = self._model.hidden(tokens, views, output_rows)
        if states is None:
            return ModelStep(self, plan, views, NO_SAMPLES, None)
        if not scored:
            return ModelStep(self, plan, views, self._output(plan, states), None)
        last, inner = states[: len(rows)], states[len(rows) :]
        output = self._output(plan, last) if rows else NO_SAMPLES
        return ModelStep(self, plan, views, output, inner)

    def _batch(self, entries: SequenceOf[PlanEntry]) -> tuple[mx.array, list[int]]:
        """Return all entries' tokens as one array, and the indices of those before sampled ones."""
        tokens: list[int] = []
        rows: list[int] = []
        pending: list[tuple[int, int]] = []
        for entry in entries:
            if isinstance(entry.tokens, PendingToken):
                assert entry.tokens.step == self._sampled_by, "not sampled by the step before"
                pending.append((len(tokens), entry.tokens.row))
                tokens.append(0)
            else:
                tokens += entry.tokens
            rows += range(len(tokens) - entry.num_sampled, len(tokens))
        return self._tokens(tokens, pending), rows

    def _tokens(self, known: list[int], pending: list[tuple[int, int]]) -> mx.array:
        """Return token ids as an array. ``known`` has 0 for each unread token. ``pending`` has
        such a token's indices in ``known`` and among the previous step's samples."""
        if not pending:
            return mx.array(known)
        all_pending = len(pending) == len(known) == self._sampled.size
        if all_pending and all(place == row for place, row in pending):
            return self._sampled  # the array needs all sampled tokens, in the same order
        places = list(range(len(known)))
        for place, row in pending:
            places[place] = len(known) + row
        known_ids = mx.array(known, dtype=mx.int32)
        return mx.concatenate([known_ids, self._sampled])[mx.array(places)]

    def _output(self, plan: StepPlan, states: mx.array) -> PendingSamples | mx.array:
        if self._pools:
            return pool(states)
        logits = self._model.head(states)
        return logits if plan.needs_state else self.sample(plan, logits)

    def sample(
        self, plan: StepPlan, logits: mx.array, state: SamplingState | None = None
    ) -> PendingSamples:
        """Choose the plan's tokens, and keep them on the device for the next step."""
        sampling = [each for entry in plan.entries for each in entry.samplings]
        samples = sample(logits, sampling, state, self._workers)
        self._sampled = samples.arrays[0].astype(mx.int32)
        self._sampled_by = plan.number
        return samples


@contextmanager
def cancelling(
    steps: SequenceOf[KVViews], note_completed: Callable[[int], None] = lambda _: None
) -> Iterator[None]:
    """If the ``with`` block raises an error, wait for submitted work, cancel the steps and note
    their epochs. Raises EngineFailedError if the wait fails. Raises the error of ``_gpu_error``
    without a wait, because the device may still run."""
    try:
        yield
    except Exception as error:
        if (failed := _gpu_error(error)) is not None:
            raise failed from error
        try:
            mx.synchronize()
        except Exception as lost:
            raise _gpu_error(lost) or EngineFailedError("the device is lost") from lost
        for views in steps:
            views.cancel()
            note_completed(views.epoch)
        raise


def _gpu_error(error: Exception) -> BackendFailedError | EngineFailedError | None:
    message = str(error)
    if GPU_FAULT not in message:
        return None
    failure = GPUFailure.of(message)
    if failure is GPUFailure.KV_MEMORY:
        return BackendFailedError(f"a step met memory that is not mapped: {message}")
    why = "the device has failed" if failure is None else failure.advice
    return EngineFailedError(f"{why} ({message})")
