"""Tells a broken model from requests that it cannot compute."""

from collections.abc import Callable, Sequence

from engine.step_plan import NOT_FINITE, Outcome, RowError
from engine.types import Request, SamplingParams, TokenEvent

# Requests of clients have numbers from 1 on.
HEALTH_CHECK_ID = 0
# Before all others.
HEALTH_CHECK_PRIORITY = -(2**31)


class ModelFailedError(RuntimeError):
    """The model cannot compute any more what it could compute at the start."""


class ModelHealthCheck:
    """Submits a request of its own when no output of a step was finite, or when it is told to.

    A request whose output is not finite fails alone. Where a step has no other output, the model
    is asked for the token after token 0. It could compute that when the engine was started: where
    it cannot now, no request is to blame.
    """

    def __init__(self, submit: Callable[[Request], None], *, pooling: bool) -> None:
        """submit: queues a request. pooling: whether the model makes vectors and no tokens."""
        self._submit = submit
        self._pooling = pooling
        self.is_running = False
        """Whether its request has been submitted and has not ended."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Submit its own request where a step has outcomes, and none of them is finite."""
        if outcomes and all(isinstance(each, RowError) and each == NOT_FINITE for each in outcomes):
            self.start()

    def start(self) -> None:
        """Submit its own request, unless it is under way."""
        if self.is_running:
            return
        self.is_running = True
        params = SamplingParams(max_tokens=0 if self._pooling else 1, temperature=0.0)
        self._submit(
            Request(HEALTH_CHECK_ID, (0,), params, HEALTH_CHECK_PRIORITY, pooling=self._pooling)
        )

    def take_own(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events of other requests than its own. Raises ModelFailedError when the output
        of its own was not finite."""
        if not self.is_running:
            return events
        for event in events:
            if event.request_id == HEALTH_CHECK_ID and event.finish is not None:
                self.is_running = False
                if event.message == NOT_FINITE.message:
                    raise ModelFailedError(
                        "the model cannot decode: all of its output is not finite"
                    )
        return [event for event in events if event.request_id != HEALTH_CHECK_ID]
