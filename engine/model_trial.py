"""Tells a model that computes nothing any more from requests that it cannot compute."""

from collections.abc import Callable

from engine.results import NOT_FINITE
from engine.types import Request, SamplingParams, TokenEvent

# Requests of clients have numbers from 1 on.
TRIAL_ID = 0
# Ahead of everybody.
TRIAL_PRIORITY = -(2**31)


class ModelFailedError(RuntimeError):
    """The model cannot say any more what it could say at the start."""


class ModelTrial:
    """A request whose output is not finite fails alone. Where that was all that a step had to say,
    the model is asked for the token after token 0: it could say it when the engine was started, so
    that no request is to blame where it cannot now.
    """

    def __init__(self, ask: Callable[[Request], None], *, pooling: bool) -> None:
        """ask: queues a request. pooling: whether the model makes vectors and no tokens."""
        self._ask = ask
        self._pooling = pooling
        self.runs = False
        """Whether the model has been asked and has not answered yet."""

    def judge(self, events: list[TokenEvent], *, all_failed: bool) -> list[TokenEvent]:
        """events: of a step. all_failed: whether it had results, and none of them was finite.

        Returns the events of others than the trial. Raises ModelFailedError.
        """
        for event in events:
            if event.request_id == TRIAL_ID and event.finish is not None:
                self.runs = False
                if event.message == NOT_FINITE:
                    raise ModelFailedError(
                        "the model cannot decode: all of its output is not finite"
                    )
        if all_failed and not self.runs:
            self.runs = True
            params = SamplingParams(max_tokens=0 if self._pooling else 1, temperature=0.0)
            self._ask(Request(TRIAL_ID, (0,), params, TRIAL_PRIORITY, pooling=self._pooling))
        return [event for event in events if event.request_id != TRIAL_ID]
