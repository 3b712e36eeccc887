"""The pipeline: steps that were launched and have not been read. Two at most, so that the device
never waits."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.figures import StepMeter
from engine.step.plan import InFlightStep, Outcome, PendingState, StepPlan, StepRunner
from engine.types import EngineFailedError
from kvcache.backend import BackendFailedError
from kvcache.manager import KVCacheManager

log = logging.getLogger(__name__)

# A second failed step within this time ends the engine: such a failure is not one request's fault.
FAILURE_WINDOW_S = 60.0
# Errors that no engine survives.
FATAL = (AssertionError, BackendFailedError, EngineFailedError)
# A sequence that joins waits for PATIENCE times the length of the newest mapping point, and at most
# LONGEST_PATIENCE_S: others may come meanwhile, or running ones may need a point themselves.
PATIENCE = 20
LONGEST_PATIENCE_S = 0.15


class CompletedStep(NamedTuple):
    """A step that was read."""

    plan: StepPlan
    outcomes: Sequence[Outcome]
    """In the order of the entries that have one."""
    seconds: float
    """Since the step before was read, if that was later than its own beginning."""


class FailedStep(NamedTuple):
    """A step that could not be run."""

    plan: StepPlan


class CancelledStep(NamedTuple):
    """A step behind one that failed: it read results that the failed one did not write."""

    plan: StepPlan


RetiredStep = CompletedStep | FailedStep | CancelledStep


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    step: InFlightStep | None
    """None where it has failed."""
    started_s: float


class MappingPoints:
    """Measures mapping points: no step is in flight then, and the device has nothing to do."""

    def __init__(self, kv: KVCacheManager, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._clock = clock
        self._took_s = 0.0
        """The length of the newest one."""
        self._wanted_s: float | None = None
        """When the next one was first wanted."""
        self._began_s: float | None = None

    def is_due(self) -> bool:
        """Return whether the next point comes before the next step. A step is in flight."""
        if not self._kv.wants_mapping_point:
            self._wanted_s = None
            return False
        now = self._clock()
        if self._wanted_s is None:
            self._wanted_s = now
        return now - self._wanted_s >= min(PATIENCE * self._took_s, LONGEST_PATIENCE_S)

    def begin(self) -> None:
        """Note that no step is in flight."""
        if self._kv.wants_mapping_point:
            self._began_s, self._wanted_s = self._clock(), None

    def end(self) -> None:
        """Note that a step was begun."""
        if self._began_s is not None:
            self._took_s = self._clock() - self._began_s
            self._began_s = None


class StepPipeline:
    """Launches steps and retires them, in order, and measures how long each took."""

    def __init__(
        self, runner: StepRunner, clock: Callable[[], float], points: MappingPoints
    ) -> None:
        self.meter = StepMeter()
        self.num_retired = 0
        """Steps that have been read, or have failed."""
        self.step_seconds = 0.0
        """The time of the newest completed step."""
        self._runner = runner
        self._clock = clock
        self._points = points
        self._launched: deque[_Launched] = deque()
        self._retired_s = float("-inf")
        self._failed_s: float | None = None

    @property
    def depth(self) -> int:
        """Return how many steps are in flight."""
        return len(self._launched)

    def may_launch(self) -> bool:
        """Return whether another step may follow: not behind a failed one that was not retired, nor
        where those in flight must end before memory is mapped."""
        if any(launched.step is None for launched in self._launched):
            return False
        return not (self._launched and self._points.is_due())

    def advance(self, plan: StepPlan) -> list[RetiredStep]:
        """Launch the plan's step and retire all before it; where it has no entries, all steps.
        Raises as ``launch`` does."""
        self.launch(plan)
        retired = self.retire(1 if plan.entries else 0)
        if plan.entries:
            self._points.end()
        if not self._launched:
            self._points.begin()
        return retired

    def launch(self, plan: StepPlan) -> None:
        """Build the plan's step, if it has any entries; behind a step in flight, submit the part
        that the device has room for. Raises EngineFailedError when it is the second one that fails
        within a minute."""
        if not plan.entries:
            return
        started_s = self._clock()
        for submitted_s in plan.begun:
            if submitted_s is not None:
                self.meter.left_queue(started_s - submitted_s)
        launched = _Launched(plan, None, started_s)
        try:
            launched.step = self._runner.begin(plan, overlapped=self.depth > 0)
        except FATAL:
            raise
        except Exception as error:
            self._note_failure(error)
        self._launched.append(launched)

    def flush(self, state: PendingState | None) -> None:
        """Submit all of the step in flight, if there is one. Those before it have been retired.
        state: where its plan needs one. Raises as ``launch`` does."""
        if not self._launched:
            return
        (launched,) = self._launched
        assert launched.step is not None, "a step that has failed is retired first"
        try:
            launched.step.submit(state)
        except FATAL:
            raise
        except Exception as error:
            self._note_failure(error)
            launched.step = None

    def retire(self, max_left: int) -> list[RetiredStep]:
        """Read steps, the oldest first, until at most ``max_left`` are in flight, and none that has
        failed. Raises as ``launch`` does."""
        retired: list[RetiredStep] = []
        while self.depth > max_left or (self._launched and self._launched[0].step is None):
            retired += self._retire(self._launched.popleft())
        return retired

    def _retire(self, launched: _Launched) -> list[RetiredStep]:
        outcomes = self._read(launched)
        self.num_retired += 1
        if outcomes is None:
            return [*self._cancel_later_steps(), FailedStep(launched.plan)]
        now = self._clock()
        self.step_seconds = now - max(launched.started_s, self._retired_s)
        self._retired_s = now
        self.meter.step_ran(self.step_seconds, len(launched.plan.entries))
        return [CompletedStep(launched.plan, outcomes, self.step_seconds)]

    def _read(self, launched: _Launched) -> Sequence[Outcome] | None:
        """Return the step's outcomes; None when it failed."""
        try:
            return None if launched.step is None else launched.step.read()
        except FATAL:
            raise
        except Exception as error:
            self._note_failure(error)
            return None

    def _cancel_later_steps(self) -> list[RetiredStep]:
        """Cancel the steps behind one that failed; one that has failed itself is retired later."""
        running = [(later, later.step) for later in self._launched if later.step is not None]
        for later, step in running:
            step.cancel()
            self._launched.remove(later)
        return [CancelledStep(later.plan) for later, _ in running]

    def _note_failure(self, error: Exception) -> None:
        log.error("step failed", exc_info=error)
        now, before = self._clock(), self._failed_s
        if before is not None and now - before < FAILURE_WINDOW_S:
            raise EngineFailedError("two steps failed within a minute") from error
        self._failed_s = now
