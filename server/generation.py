"""The one neutral form between wire formats and the engine: a prompt in, deltas of text out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from engine.client import EngineClient, TokenStream
from engine.types import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from server.text.detokenizer import Detokenizer
from server.text.parser import Part, Piece, ReasoningParser, joined
from server.text.stop_strings import StopStrings
from server.text.tokenizer import Tokenizer


class GenerationError(Exception):
    """The engine ended a request with a fault; the message is fit for clients."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be answered."""

    ids: tuple[int, ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    text: str | None = None
    """The rendered chat prompt: its answer is split into reasoning and content. None: it is not."""


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A generated token and its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens so far."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to an answer."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: list[TokenReport] = field(default_factory=list)
    finish: str | None = None
    """"stop" or "length", with the last delta."""
    waiting: bool = False
    """Nothing has happened for a while: time for a sign of life."""


class Generation:
    """One answer as it comes into being."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, prompt: Prompt) -> None:
        """Hands the prompt to the engine. Raises what ``EngineClient.submit`` raises."""
        self._stream: TokenStream = client.submit(prompt.ids, prompt.params)
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopStrings(prompt.stop)
        self._parser = ReasoningParser(prompt.text) if prompt.text is not None else None
        self._stop_token_ids = prompt.params.stop_token_ids
        self._completion_tokens = 0
        self._reasoning_tokens = 0

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(
            len(self._stream.request.prompt_ids), self._completion_tokens, self._reasoning_tokens
        )

    async def deltas(self, ping_s: float) -> AsyncIterator[Delta]:
        """Deltas until one has ``finish``; a ``waiting`` one whenever ``ping_s`` pass without any.

        Raises GenerationError for a fault of the engine. Leaving the iteration early aborts the
        request.
        """
        try:
            finished = False
            while not finished:
                delta = self._take(await self._stream.next_batch(ping_s))
                finished = delta.finish is not None
                yield delta
        finally:
            self.close()

    def close(self) -> None:
        """Aborts the request unless it has ended. Idempotent."""
        self._stream.close()

    def _take(self, events: list[TokenEvent]) -> Delta:
        if not events:
            return Delta(waiting=True)
        pieces: list[Piece] = []
        tokens: list[TokenReport] = []
        finish: str | None = None
        for event in events:
            if event.finish in (FinishReason.ERROR, FinishReason.ABORTED):
                raise GenerationError(event.message or "the request was aborted")
            pieces += self._split(self._take_token(event, tokens))
            if self._stop.matched is not None:
                finish = "stop"
                break
            if event.finish is not None:
                pieces += self._split(self._stop.feed(self._detokenizer.flush()))
                pieces += self._split(self._stop.flush())
                finish = event.finish.value if self._stop.matched is None else "stop"
        if finish is not None and self._parser is not None:
            pieces += self._parser.flush()
        return Delta(joined(pieces), tokens, finish)

    def _take_token(self, event: TokenEvent, tokens: list[TokenReport]) -> str:
        """The text that may be sent because of a token."""
        assert event.token_id is not None, "only a fault comes without a token"
        self._completion_tokens += 1
        if self._parser is not None and self._parser.reasoning:
            self._reasoning_tokens += 1
        if event.token_id in self._stop_token_ids:
            return ""  # it ends the answer and is no part of it
        if event.logprobs is not None:
            tokens.append(TokenReport(event.token_id, event.logprobs))
        return self._stop.feed(self._detokenizer.feed(event.token_id))

    def _split(self, text: str) -> list[Piece]:
        if not text:
            return []
        return self._parser.feed(text) if self._parser else [Piece(Part.CONTENT, text)]
