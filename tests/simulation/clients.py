"""Clients of the simulated engine: they check their answers, and may leave."""

from dataclasses import dataclass, field

import numpy as np

from engine.client import TokenStream
from engine.types import FinishReason, Request, SamplingParams, TokenEvent
from tests.simulation.faults import SimulationError
from tests.simulation.recall import Recall, Third, vector

ENDS_WITH_TOKEN = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class Client:
    """One answer from both ends: the engine's events, and its reader's view of them."""

    request: Request
    answer_id: int
    recall: Recall
    stream: TokenStream
    max_model_len: int
    max_backlog: int
    pace: int
    """Rounds between two reads; 0: it never reads."""
    leaves_after: int | None
    """Tokens that it reads before it closes the stream."""
    answered: int = 0
    """Tokens that the engine has emitted."""
    heard: bool = False
    """Whether the engine has emitted an event."""
    finish: FinishReason | None = None
    aborted: bool = False
    """Whether the engine was told to abort it."""
    unread: int = 0
    read: int = 0
    """Tokens that the reader has."""
    reader_end: FinishReason | None = None
    left: bool = False
    """Whether the reader closed the stream."""
    messages: list[str] = field(default_factory=list)
    asked: int = 0
    """Masks that its constraint had filled at its end."""

    @property
    def constraint(self) -> Third | None:
        constraint, number = self.request.constraint, self.answer_id - self.request.request_id
        if isinstance(constraint, Third) and number:
            constraint = constraint.copies[number - 1]
        assert constraint is None or isinstance(constraint, Third)
        return constraint

    @property
    def params(self) -> SamplingParams:
        return self.request.params[self.answer_id - self.request.request_id]

    @property
    def tokens(self) -> list[int]:
        return self.recall.tokens(len(self.request.prompt_ids) + self.answered)

    @property
    def order(self) -> tuple[int, int]:
        return (self.request.priority, self.answer_id)

    def take(self, event: TokenEvent) -> None:
        """Check an event that leaves the engine: it must be the right one, and none may follow the
        last."""
        if self.finish is not None:
            raise SimulationError(f"{self._name} gets {event} after its end")
        if event.token_id is not None:
            self._check_token(self.answered, event.token_id)
            self.answered += 1
            if self.answered > self.params.max_tokens:
                raise SimulationError(f"{self._name} gets a token that it did not want")
            fails_at = None if self.constraint is None else self.constraint.fails_at
            if fails_at is not None and self.answered > fails_at:
                raise SimulationError(f"{self._name} gets a token that its constraint refuses")
        self._check_reading(event)
        due = self._due_end(event)
        if event.finish in ENDS_WITH_TOKEN or due is not None:
            if event.finish is not due:
                raise SimulationError(f"{self._name} ends with {event.finish}, due was {due}")
        elif event.finish is None and event.token_id is None:
            raise SimulationError(f"{self._name} gets an event that says nothing")
        elif event.finish is not None and event.token_id is not None:
            raise SimulationError(f"{self._name} gets a token with {event.finish}")
        if event.finish is FinishReason.ABORTED and not self.aborted:
            raise SimulationError(f"{self._name} was aborted by nobody")
        self.finish = event.finish
        self.heard = True
        self.asked = self.constraint.asked if self.constraint is not None else 0

    def deliver(self, event: TokenEvent) -> None:
        self.unread += 1
        self.stream.deliver(event)

    def read_some(self, round_number: int) -> None:
        """Let the reader read, if it is its time and there is something."""
        if not self.unread or self.left or not self.pace or round_number % self.pace:
            return
        self.unread = 0
        batch = _next_batch(self.stream)
        if len(batch) > self.max_backlog + 1:
            raise SimulationError(f"{len(batch)} events wait for the reader of {self._name}")
        for event in batch:
            if self.reader_end is not None:
                raise SimulationError(f"the reader of {self._name} gets {event} after the end")
            if event.token_id is not None:
                self._check_token(self.read, event.token_id)
                self.read += 1
            self.reader_end = event.finish
            if event.message:
                self.messages.append(event.message)
        if self.leaves_after is not None and self.read >= self.leaves_after:
            self.leave()

    def leave(self) -> None:
        self.left = True
        self.stream.close()

    def check_end(self) -> None:
        """Check that engine and reader have each seen one end."""
        if self.finish is None:
            raise SimulationError(f"{self._name} never ended")
        if self.constraint is not None and self.constraint.asked != self.asked:
            raise SimulationError(f"the constraint of {self._name} is asked after its end")
        self.pace = 1
        self.read_some(0)
        if not self.left:
            if self.reader_end is None or _next_batch(self.stream):
                raise SimulationError(f"the reader of {self._name} waits for ever")
            if self.reader_end is not self.finish and not self.aborted:
                raise SimulationError(f"{self._name} ended differently for its reader")
            was_cut = "the reader is too slow" in self.messages
            if self.reader_end is self.finish and self.read != self.answered and not was_cut:
                raise SimulationError(f"the reader of {self._name} misses tokens")

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return f"request {self.answer_id}"

    def _check_token(self, number: int, token: int) -> None:
        want = self.recall.token(len(self.request.prompt_ids) + number)
        if token != want:
            raise SimulationError(f"{self._name}: token {number} is {token}, not {want}")

    def _check_reading(self, event: TokenEvent) -> None:
        """Check that the first event has the results of the prompt, unless it is a bad end."""
        good = event.finish in (None, *ENDS_WITH_TOKEN) and not self.heard
        length, found = len(self.request.prompt_ids), event.prompt_logprobs
        wanted = good and self.params.prompt_logprobs is not None
        if found != (self.recall.scores(length) if wanted else None):
            raise SimulationError(f"{self._name} is told of its prompt: {found}")
        pooled = event.embedding
        if (pooled is not None) != (good and self.request.pooling):
            raise SimulationError(f"{self._name} gets the vector {pooled}")
        if pooled is not None and not np.array_equal(pooled, vector(self.recall.slots(length))):
            raise SimulationError(f"{self._name} gets a vector of something else")

    def _due_end(self, event: TokenEvent) -> FinishReason | None:
        """Return the end that comes with this event, unless it is a bad one."""
        params, token = self.params, event.token_id
        if event.embedding is not None:
            return FinishReason.STOP
        if token is None:
            reading = event.prompt_logprobs is not None and params.max_tokens == 0
            return FinishReason.LENGTH if reading else None
        if token in params.stop_token_ids:
            return FinishReason.STOP
        full = len(self.request.prompt_ids) + self.answered >= self.max_model_len
        return FinishReason.LENGTH if full or self.answered >= params.max_tokens else None


def _next_batch(stream: TokenStream) -> list[TokenEvent]:
    """Return the stream's events without an event loop: it need not wait."""
    coroutine = stream.next_batch(0.0)
    try:
        coroutine.send(None)
    except StopIteration as stop:
        batch: list[TokenEvent] = stop.value
        return batch
    raise SimulationError("a stream with events makes its reader wait")
