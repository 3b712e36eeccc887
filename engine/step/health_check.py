"""Checks that the model works, by a small request of the engine's own."""

from collections.abc import Callable, Sequence

from engine.step.plan import NOT_FINITE, Outcome, RowError, Verified
from engine.types import Request, SamplingParams, TokenEvent

# The id of the health check's request. Clients' requests have ids from 1 on.
HEALTH_CHECK_ID = 0
# Lower than any other priority value, so that the health check runs first.
HEALTH_CHECK_PRIORITY = -(2**31)


class ModelFailedError(RuntimeError):
    """The model's output in a health check was not finite."""


class ModelHealthCheck:
    """Checks the model after a step without a finite output.

    A single request may have output that is not finite, and fails alone. If a whole step has no
    finite output, the model may be broken. Then the check computes the token that follows token 0.
    """

    def __init__(self, submit: Callable[[Request], None], *, pooling: bool) -> None:
        """``submit`` queues a request. With ``pooling``, the model makes vectors, not tokens."""
        self._submit = submit
        self._pooling = pooling
        self.is_running = False

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Start a check if a step has outcomes, and none of the outcomes is finite."""
        firsts = [each.tokens[0] if isinstance(each, Verified) else each for each in outcomes]
        if firsts and all(isinstance(each, RowError) and each == NOT_FINITE for each in firsts):
            self.start()

    def start(self) -> None:
        """Submit the check's request, unless a check is running."""
        if self.is_running:
            return
        self.is_running = True
        params = SamplingParams(max_tokens=0 if self._pooling else 1, temperature=0.0)
        self._submit(
            Request(
                (0,),
                (params,),
                request_id=HEALTH_CHECK_ID,
                priority=HEALTH_CHECK_PRIORITY,
                pooling=self._pooling,
            )
        )

    def take_own(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Return the events of clients' requests. Raises ModelFailedError after a failed check."""
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
