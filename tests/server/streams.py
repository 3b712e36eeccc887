"""An engine's side of one request, prepared in advance: every await comes back at once."""

from typing import Any, cast

from engine.client import EngineClient
from engine.types import (
    EngineStats,
    FinishReason,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from server.generation import Generation, Prompt
from server.text.tokenizer import Tokenizer
from tests.server.harness import ids_of

Batches = list[list[TokenEvent]]


class PreparedStream:
    """Hands out its batches in order; an empty one stands for time that passed in silence."""

    def __init__(self, request: Request, batches: Batches) -> None:
        self.request = request
        self.closed = False
        self._batches = iter(batches)

    async def next_batch(self, timeout_s: float) -> list[TokenEvent]:
        assert timeout_s > 0
        return next(self._batches)

    def close(self) -> None:
        self.closed = True


class PreparedClient:
    """Answers every request with the same batches."""

    def __init__(self, batches: Batches) -> None:
        self.stats = EngineStats()
        self.streams: list[PreparedStream] = []
        self._batches = batches

    def submit(self, ids: tuple[int, ...], params: SamplingParams, **_: Any) -> PreparedStream:
        self.streams.append(PreparedStream(Request(1, ids, params), self._batches))
        return self.streams[-1]


def token(
    token_id: int, finish: FinishReason | None = None, logprob: float | None = None
) -> TokenEvent:
    """A token that was generated."""
    logprobs = None if logprob is None else TokenLogprobs(logprob, ())
    return TokenEvent(1, token_id, finish, logprobs)


def said(
    tokenizer: Tokenizer, text: str, finish: FinishReason | None = FinishReason.LENGTH
) -> list[TokenEvent]:
    """The events of a text, the last one with the finish."""
    *ids, last = ids_of(tokenizer, text)
    return [token(token_id) for token_id in ids] + [token(last, finish)]


def fault(message: str | None = "a step failed") -> TokenEvent:
    """An end that is no answer."""
    return TokenEvent(1, None, FinishReason.ERROR, message=message)


def prepared(
    tokenizer: Tokenizer,
    batches: Batches,
    *,
    stop: tuple[str, ...] = (),
    chat: str | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
) -> tuple[Generation, PreparedStream]:
    """A generation of those batches. chat: the rendered prompt, where thoughts are split off."""
    client = PreparedClient(batches)
    params = SamplingParams(max_tokens=100, stop_token_ids=stop_token_ids)
    generation = Generation(
        cast(EngineClient, client), tokenizer, Prompt((1, 2, 3), params, stop, chat)
    )
    return generation, client.streams[0]
