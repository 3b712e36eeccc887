"""An engine's side of one request, prepared in advance: every await comes back at once."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from engine.client import EngineClient, Slots, TokenStream
from engine.types import (
    EngineLimits,
    EngineStats,
    FinishReason,
    PrefixReport,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from server.chat.generation import Choices, Prompt
from server.metrics.answer_times import Latencies, RequestTimes
from server.text.pipeline import ParseOptions
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.server.harness import ids_of

Batches = list[list[TokenEvent]]


class PreparedStream(TokenStream):
    """Knows whether it has been closed, before its end or after it."""

    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


class PreparedWake(asyncio.Event):
    """Instead of waiting it delivers the next batch; an empty one stands for time that passed in
    silence."""

    def __init__(self, batches: Iterator[list[TokenEvent]]) -> None:
        super().__init__()
        self.streams: list[PreparedStream] = []
        self._batches = batches

    async def wait(self) -> bool:  # type: ignore[override]
        batch = next(self._batches)
        if not batch:
            raise TimeoutError
        for event in batch:
            self.streams[event.request_id - 1].deliver(event)
        return True


class PreparedClient:
    """Answers every request with the same batches, in which the choices are 1, 2, ..."""

    alive = True
    in_flight = 0
    limits = EngineLimits(max_model_len=400, max_num_seqs=8, vocab_size=VOCAB)
    slots = Slots(1.0, lambda: 64)

    def __init__(self, batches: Batches) -> None:
        self.stats = EngineStats()
        self.streams: list[PreparedStream] = []
        self.aborted: list[int] = []
        self._batches = batches

    def attach(self) -> None:
        """There is no thread to get events from."""

    def submit(self, asked: Request, read_with: TokenStream | None = None) -> Sequence[TokenStream]:
        wake = PreparedWake(iter(self._batches)) if read_with is None else read_with.wake
        assert isinstance(wake, PreparedWake)
        asked = replace(asked, request_id=len(wake.streams) + 1)
        streams = [
            PreparedStream(asked, answer_id, self.aborted.append, 1000, wake)
            for answer_id in asked.answer_ids
        ]
        wake.streams += streams
        self.streams += streams
        return streams


def token(
    token_id: int | None,
    finish: FinishReason | None = None,
    logprob: float | None = None,
    *,
    choice: int = 0,
    prefix: PrefixReport | None = None,
) -> TokenEvent:
    """A token that was generated."""
    logprobs = None if logprob is None else TokenLogprobs(logprob, ())
    return TokenEvent(1 + choice, token_id, finish, logprobs, prefix=prefix)


def scored(
    *logprobs: float,
    token_id: int | None = None,
    finish: FinishReason | None = None,
    logprob: float | None = None,
    choice: int = 0,
) -> TokenEvent:
    """A first event with the log-probabilities of all tokens of a prompt but the first."""
    prompt = (None, *(TokenLogprobs(value, ()) for value in logprobs))
    return token(token_id, finish, logprob, choice=choice)._replace(prompt_logprobs=prompt)


def said(
    tokenizer: Tokenizer,
    text: str,
    finish: FinishReason | None = FinishReason.LENGTH,
    choice: int = 0,
) -> list[TokenEvent]:
    """The events of a text, the last one with the finish."""
    *ids, last = ids_of(tokenizer, text)
    before = [token(token_id, choice=choice) for token_id in ids]
    return [*before, token(last, finish, choice=choice)]


def fault(message: str | None = "a step failed") -> TokenEvent:
    """An end that is no answer."""
    return TokenEvent(1, None, FinishReason.ERROR, message=message)


def parse_options(chat: str | ParseOptions | None) -> ParseOptions | None:
    """A rendered prompt without tools stands for how its answer is read."""
    return ParseOptions(chat) if isinstance(chat, str) else chat


def prompt_of(
    ids: tuple[int, ...],
    params: SamplingParams,
    stop: tuple[str, ...] = (),
    options: ParseOptions | None = None,
    *,
    choices: int = 1,
    **fields: Any,
) -> Prompt:
    return Prompt(Request(ids, (params,) * choices, **fields), stop, options)


def new_times() -> RequestTimes:
    return RequestTimes(Latencies(100))


def prepared(
    tokenizer: Tokenizer,
    batches: Batches,
    *,
    stop: tuple[str, ...] = (),
    chat: str | ParseOptions | None = None,
    stop_token_ids: frozenset[int] = frozenset(),
    choices: int = 1,
) -> tuple[Choices, list[PreparedStream]]:
    """Choices of those batches. chat: how they are read, or the rendered prompt alone, where
    thoughts are split off."""
    client = PreparedClient(batches)
    params = SamplingParams(max_tokens=100, stop_token_ids=stop_token_ids)
    found = Choices(
        cast(EngineClient, client),
        tokenizer,
        prompt_of((1, 2, 3), params, stop, parse_options(chat), choices=choices),
        times=new_times(),
    )
    return found, client.streams
