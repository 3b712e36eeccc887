"""The one neutral form between wire formats and the engine: a prompt in, deltas of text out."""

from dataclasses import dataclass, field

from engine.client import NO_SALT, TokenStream
from engine.types import (
    FinishReason,
    PrefixReport,
    PrefixSalt,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
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
    choices: int = 1
    """How many answers are wanted."""
    salt: PrefixSalt = NO_SALT
    system_tokens: int = 0
    """Leading tokens that belong to the system messages."""


@dataclass(frozen=True, slots=True)
class TokenReport:
    """A generated token and its log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens so far: the prompt's once, those of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    prefix: PrefixReport | None = None
    """What the cache had of the prompt; None while that is not known."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to an answer."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: list[TokenReport] = field(default_factory=list)
    finish: str | None = None
    """"stop" or "length", with the last delta."""
    index: int = 0
    """Which of the choices it belongs to."""


class Generation:
    """One answer as it comes into being."""

    def __init__(
        self, stream: TokenStream, tokenizer: Tokenizer, prompt: Prompt, index: int = 0
    ) -> None:
        """stream: of the request for the choice ``index``."""
        self.stream = stream
        self._index = index
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopStrings(prompt.stop)
        self._parser = ReasoningParser(prompt.text) if prompt.text is not None else None
        self._stop_token_ids = prompt.params.stop_token_ids
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.prefix: PrefixReport | None = None
        self.finished = False

    def take(self, events: list[TokenEvent]) -> Delta:
        """What events of its stream add to the answer; its end closes the stream.

        Raises GenerationError for a fault of the engine.
        """
        pieces: list[Piece] = []
        tokens: list[TokenReport] = []
        finish: str | None = None
        for event in events:
            if event.finish in (FinishReason.ERROR, FinishReason.ABORTED):
                raise GenerationError(event.message or "the request was aborted")
            self.prefix = self.prefix or event.prefix
            pieces += self._split(self._take_token(event, tokens))
            if self._stop.matched is not None:
                finish = "stop"
                break
            if event.finish is not None:
                pieces += self._split(self._stop.feed(self._detokenizer.flush()))
                pieces += self._split(self._stop.flush())
                finish = event.finish.value if self._stop.matched is None else "stop"
        if finish is not None:
            self.finished = True
            self.stream.close()
            pieces += self._parser.flush() if self._parser is not None else []
        return Delta(joined(pieces), tokens, finish, self._index)

    def _take_token(self, event: TokenEvent, tokens: list[TokenReport]) -> str:
        """The text that may be sent because of a token."""
        assert event.token_id is not None, "only a fault comes without a token"
        self.completion_tokens += 1
        if self._parser is not None and self._parser.reasoning:
            self.reasoning_tokens += 1
        if event.token_id in self._stop_token_ids:
            return ""  # it ends the answer and is no part of it
        if event.logprobs is not None:
            tokens.append(TokenReport(event.token_id, event.logprobs))
        return self._stop.feed(self._detokenizer.feed(event.token_id))

    def _split(self, text: str) -> list[Piece]:
        if not text:
            return []
        return self._parser.feed(text) if self._parser else [Piece(Part.CONTENT, text)]
