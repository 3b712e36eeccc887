"""Launches and reads steps. Two may be in flight (begun, not read), to keep the device busy. Now
and then none is in flight (a mapping point), so that memory can be mapped."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.figures import StepMeter
from engine.step.plan import InFlightStep, Outcome, PendingState, StepPlan, StepRunner
from engine.types import EngineFailedError
from kvcache.backends.backend import BackendFailedError
from kvcache.manager import KVCacheManager

log = logging.getLogger(__name__)

# Two failed steps within this time end the engine, because no single request caused both.
FAILURE_WINDOW_S = 60.0
# Errors that end the engine at once.
FATAL = (AssertionError, BackendFailedError, EngineFailedError)
# To map memory for several sequences in one mapping point, delay it by PATIENCE times the length of
# the last one, but at most by LONGEST_PATIENCE_S.
PATIENCE = 20
LONGEST_PATIENCE_S = 0.15
# Without a step in flight for longer than this, there was no work, or no memory.
LONGEST_PLANNING_S = 0.02


class CompletedStep(NamedTuple):
    """A step whose outcomes were read."""

    plan: StepPlan
    outcomes: Sequence[Outcome]
    """One outcome for each entry that samples or scores, in the plan's order."""
    seconds: float
    """The time since the step's start, or since the previous step was read if that was later."""
    interval_s: float
    """The time since the previous step was read, which includes planning; as ``seconds`` if the
    device was idle for longer than planning takes."""


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
    """Decides when mapping points are due, by the time that the last one took."""

    def __init__(self, kv: KVCacheManager, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._clock = clock
        self._took_s = 0.0
        self._wanted_s: float | None = None
        self._began_s: float | None = None

    def is_due(self) -> bool:
        if not self._kv.wants_mapping_point:
            self._wanted_s = None
            return False
        now = self._clock()
        if self._wanted_s is None:
            self._wanted_s = now
        return now - self._wanted_s >= min(PATIENCE * self._took_s, LONGEST_PATIENCE_S)

    def begin(self) -> None:
        """Begin a mapping point if one is wanted. Call this when no step is in flight."""
        if self._kv.wants_mapping_point:
            self._began_s, self._wanted_s = self._clock(), None

    def end(self) -> None:
        """End the mapping point, if any. Call this after a step has been launched."""
        if self._began_s is not None:
            self._took_s = self._clock() - self._began_s
            self._began_s = None


class StepPipeline:
    """Launches steps, retires (reads) them in order, and measures their time."""

    def __init__(
        self, runner: StepRunner, kv: KVCacheManager, clock: Callable[[], float], max_depth: int = 2
    ) -> None:
        """At most ``max_depth`` steps are in flight: 1 or 2."""
        self.meter = StepMeter()
        self._runner = runner
        self._clock = clock
        self._points = MappingPoints(kv, clock)
        self._max_depth = max_depth
        self._launched: deque[_Launched] = deque()
        self._retired_s = float("-inf")
        self._failed_s: float | None = None

    @property
    def depth(self) -> int:
        """The number of steps in flight."""
        return len(self._launched)

    def may_launch(self) -> bool:
        """Return False while the steps in flight must be retired first: because there may be no
        more of them, because one has failed, or because a mapping point is due."""
        if not self._launched:
            return True
        has_failed = any(launched.step is None for launched in self._launched)
        return not (has_failed or self.depth == self._max_depth or self._points.is_due())

    def advance(self, plan: StepPlan) -> list[RetiredStep]:
        """Launch the plan's step and retire all earlier steps. An empty plan launches nothing.
        Raises EngineFailedError if two steps have failed within FAILURE_WINDOW_S."""
        if plan.entries:
            self._launch(plan)
        retired = self._retire(1 if plan.entries else 0)
        if not self._launched:
            self._points.begin()
        return retired

    def _launch(self, plan: StepPlan) -> None:
        started_s = self._clock()
        for submitted_s in plan.begun:
            if submitted_s is not None:
                self.meter.left_queue(started_s - submitted_s)
        launched = _Launched(plan, None, started_s)
        try:
            launched.step = self._runner.begin(plan, overlapped=self.depth > 0)
        except Exception as error:
            self._note_failure(error)
        self._launched.append(launched)
        self._points.end()

    def flush(self, state: PendingState | None) -> None:
        """Submit the rest of the step in flight, if any, to the device. Call this when all earlier
        steps are retired. Raises as ``advance`` does."""
        if not self._launched:
            return
        (launched,) = self._launched
        assert launched.step is not None, "a step that has failed is retired first"
        try:
            launched.step.submit(state)
        except Exception as error:
            self._note_failure(error)
            launched.step = None

    def drain(self) -> list[RetiredStep]:
        """Retire all steps in flight. Raises as ``advance`` does."""
        return self._retire(0)

    def _retire(self, max_left: int) -> list[RetiredStep]:
        """Retire the oldest steps until at most ``max_left`` steps are in flight, and the oldest
        of them has not failed."""
        retired: list[RetiredStep] = []
        while self.depth > max_left or (self._launched and self._launched[0].step is None):
            retired += self._retire_oldest()
        return retired

    def _retire_oldest(self) -> list[RetiredStep]:
        launched = self._launched.popleft()
        outcomes = self._read(launched)
        self.meter.num_retired += 1
        if outcomes is None:
            return [*self._cancel_later_steps(), FailedStep(launched.plan)]
        now = self._clock()
        seconds = now - max(launched.started_s, self._retired_s)
        has_rested = launched.started_s - self._retired_s > LONGEST_PLANNING_S
        interval_s = seconds if has_rested else now - self._retired_s
        self._retired_s = now
        plan = launched.plan
        self.meter.step_ran(seconds, len(plan.entries), drafted=bool(plan.drafts))
        return [CompletedStep(launched.plan, outcomes, seconds, interval_s)]

    def _read(self, launched: _Launched) -> Sequence[Outcome] | None:
        try:
            return None if launched.step is None else launched.step.read()
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
        """Raise the error if it ends the engine, alone or as the second one within a minute."""
        if isinstance(error, FATAL):
            raise error
        log.error("step failed", exc_info=error)
        now, before = self._clock(), self._failed_s
        if before is not None and now - before < FAILURE_WINDOW_S:
            raise EngineFailedError("two steps failed within a minute") from error
        self._failed_s = now
