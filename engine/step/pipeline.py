"""Launches and reads steps. Two may be in flight (begun, not read), to keep the device busy."""

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

# Two failed steps within this time end the engine, because no single request caused both.
FAILURE_WINDOW_S = 60.0
# Errors that end the engine at once.
FATAL = (AssertionError, BackendFailedError, EngineFailedError)
# A mapping point is a pause without steps in flight, to map memory. To serve several sequences in
# one pause, delay it by PATIENCE times the last pause, but at most by LONGEST_PATIENCE_S.
PATIENCE = 20
LONGEST_PATIENCE_S = 0.15


class CompletedStep(NamedTuple):
    """A step whose outcomes were read."""

    plan: StepPlan
    outcomes: Sequence[Outcome]
    """One outcome for each entry that samples or scores, in the plan's order."""
    seconds: float
    """The time since the step's start, or since the previous step was read if that was later."""


class FailedStep(NamedTuple):
    """A step that raised an error instead of giving outcomes."""

    plan: StepPlan


class CancelledStep(NamedTuple):
    """A step that was cancelled because the previous step, whose tokens it needs, has failed."""

    plan: StepPlan


RetiredStep = CompletedStep | FailedStep | CancelledStep


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    step: InFlightStep | None
    """The step, or None after it has failed."""
    started_s: float


class MappingPoints:
    """Decides when to pause. In a pause (mapping point) no step is in flight, so that memory can be
    mapped. Measures the length of each pause."""

    def __init__(self, kv: KVCacheManager, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._clock = clock
        self._took_s = 0.0
        self._wanted_s: float | None = None
        self._began_s: float | None = None

    def is_due(self) -> bool:
        """Return True if a mapping point must come before the next step."""
        if not self._kv.wants_mapping_point:
            self._wanted_s = None
            return False
        now = self._clock()
        if self._wanted_s is None:
            self._wanted_s = now
        return now - self._wanted_s >= min(PATIENCE * self._took_s, LONGEST_PATIENCE_S)

    def begin(self) -> None:
        """Begin to measure a pause if one is wanted. Call this when no step is in flight."""
        if self._kv.wants_mapping_point:
            self._began_s, self._wanted_s = self._clock(), None

    def end(self) -> None:
        """End the measurement of a pause. Call this after a step has been launched."""
        if self._began_s is not None:
            self._took_s = self._clock() - self._began_s
            self._began_s = None


class StepPipeline:
    """Launches steps, retires (reads) them in order, and measures their time."""

    def __init__(
        self, runner: StepRunner, clock: Callable[[], float], points: MappingPoints
    ) -> None:
        self.meter = StepMeter()
        self.num_retired = 0
        """The number of steps that have been read or have failed."""
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
        """The number of steps in flight."""
        return len(self._launched)

    def may_launch(self) -> bool:
        """Return False while a failed step is not retired, or while steps in flight must end before
        a mapping point (pause to map memory). Return True otherwise."""
        if any(launched.step is None for launched in self._launched):
            return False
        return not (self._launched and self._points.is_due())

    def advance(self, plan: StepPlan) -> list[RetiredStep]:
        """Launch the plan's step, if any; retire all earlier steps. Raises as ``launch`` does."""
        self.launch(plan)
        retired = self.retire(1 if plan.entries else 0)
        if plan.entries:
            self._points.end()
        if not self._launched:
            self._points.begin()
        return retired

    def launch(self, plan: StepPlan) -> None:
        """Begin the plan's step if the plan has entries. Raises EngineFailedError if two steps have
        failed within FAILURE_WINDOW_S."""
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
        """Submit the rest of the step in flight, if any, to the device. Call this when all earlier
        steps are retired. Raises the same errors as ``launch``."""
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
        """Read the oldest steps until at most ``max_left`` steps are in flight. Retire more steps
        while the oldest step has failed. Raises the same errors as ``launch``."""
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
        """Return the step's outcomes, or None if the step has failed."""
        try:
            return None if launched.step is None else launched.step.read()
        except FATAL:
            raise
        except Exception as error:
            self._note_failure(error)
            return None

    def _cancel_later_steps(self) -> list[RetiredStep]:
        """Cancel the steps launched after a failed step, except those that have failed as well."""
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
