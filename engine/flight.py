"""Steps between their plans and their results: two at most, so that the device never waits."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import EngineFailedError
from engine.figures import StepMeter
from engine.scheduler import Scheduler
from engine.step_plan import RunningStep, StepPlan, StepRunner
from engine.types import Sampled, TokenEvent
from kvcache.backend import BackendFailedError

log = logging.getLogger(__name__)

# A second failed step within this time ends the engine: what failed is not one request's fault.
FAILURE_WINDOW_S = 60.0
FAILED = "a step of the engine failed"
# What no engine survives.
FATAL = (AssertionError, BackendFailedError, EngineFailedError)


@dataclass(slots=True)
class Flight:
    """A step that has not been read."""

    plan: StepPlan
    step: RunningStep | None
    """None where it has failed."""
    begun_s: float


@dataclass(frozen=True, slots=True)
class Landing:
    """What came of a step."""

    events: list[TokenEvent]
    all_bad: bool
    """Whether it had results, and none of them was finite."""


class Flights:
    """Begins steps and lands them, in order, and measures how long each took."""

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, clock: Callable[[], float]
    ) -> None:
        self.meter = StepMeter()
        self.landed = 0
        """Steps that have been read, or have failed."""
        self.step_seconds = 0.0
        """Of the newest one that has not failed: since the one before it, if that was later than
        its own beginning."""
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._flights: deque[Flight] = deque()
        self._landed_s = float("-inf")
        self._failed_at: float | None = None

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._flights)

    def begin(self, plan: StepPlan) -> None:
        """Builds the step; where another one is in flight it begins behind that. Raises
        EngineFailedError when it is the second one that fails within a minute."""
        started = self._clock()
        for request in plan.begun:
            if request.submitted_s is not None:
                self.meter.left_queue(started - request.submitted_s)
        flight = Flight(plan, None, started)
        try:
            flight.step = self._runner.begin(plan, overlapped=bool(self._flights))
        except FATAL:
            raise
        except Exception as error:
            self._note_failure(error)
        self._flights.append(flight)

    def submit(self) -> None:
        """All of the steps in flight is the device's. Raises what ``begin`` raises."""
        for flight in self._flights:
            assert flight.step is not None, "a step that has failed is landed first"
            try:
                flight.step.submit()
            except FATAL:
                raise
            except Exception as error:
                self._note_failure(error)
                flight.step = None

    def land(self, most_left: int) -> list[Landing]:
        """Reads steps, the oldest first, until no more than so many are in flight, and none that
        has failed."""
        landings: list[Landing] = []
        while self._flights and (len(self._flights) > most_left or self._flights[0].step is None):
            landings.append(self._land(self._flights.popleft()))
        return landings

    def _land(self, flight: Flight) -> Landing:
        results = self._read(flight)
        self.landed += 1
        if results is None:
            return Landing(self._scheduler.fail(flight.plan, FAILED), False)
        now = self._clock()
        self.step_seconds = now - max(flight.begun_s, self._landed_s)
        self._landed_s = now
        self.meter.step_ran(self.step_seconds, len(flight.plan.entries))
        plan = flight.plan
        self._scheduler.budget.observe(
            plan.prefill_tokens, self.step_seconds, decoding=plan.decodes
        )
        counters = self._scheduler.counters
        failed, wasted = counters.failed_rows, counters.wasted_rows
        events = self._scheduler.commit(flight.plan, results)
        failed, wasted = counters.failed_rows - failed, counters.wasted_rows - wasted
        return Landing(events, failed > 0 and failed + wasted == len(results))

    def _read(self, flight: Flight) -> list[Sampled] | None:
        """The step's results; None when it failed. What was begun behind it is dropped then: it
        read what the failed one should have written."""
        if flight.step is None:
            return None
        try:
            return flight.step.read()
        except FATAL:
            raise
        except Exception as error:
            self._note_failure(error)
        for later in self._flights:
            if later.step is not None:
                later.step.drop()
                self._scheduler.cancel(later.plan)
        self._flights = deque(later for later in self._flights if later.step is None)
        return None

    def _note_failure(self, error: Exception) -> None:
        log.error("step failed", exc_info=error)
        now, before = self._clock(), self._failed_at
        if before is not None and now - before < FAILURE_WINDOW_S:
            raise EngineFailedError("two steps failed within a minute") from error
        self._failed_at = now
