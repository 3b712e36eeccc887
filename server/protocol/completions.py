"""POST /v1/completions: the fields of a request, and the objects of its answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

from pydantic import Field

from engine.types import TokenLogprobs
from server.config import LimitsSection
from server.protocol.answers import (
    EVENTS,
    Json,
    ResponseMetadata,
    StreamForm,
    TokenText,
    extend,
    usage_chunks,
    usage_object,
)
from server.protocol.common import OpenAISamplingFields, ResponseOptions, TextsOrIds, Whole
from server.protocol.fields import refused
from server.protocol.wire_errors import ApiError, check_count, invalid
from server.text.pieces import Delta, TextPiece, Usage
from server.text.tokenizer import EncodedText

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5

PromptText = str | list[int]


class CompletionRequest(OpenAISamplingFields):
    """The body of POST /v1/completions."""

    refused_fields = refused("sampling", "completions")

    prompt: TextsOrIds
    logprobs: Whole | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    return_token_ids: bool | None = None
    best_of: Whole | None = None

    def check(self, limits: LimitsSection) -> None:
        super().check(limits)
        if self.best_of not in (None, self.response_options.choices):
            raise invalid("best_of is not supported, unless it is n: use n.", "best_of")
        check_count(len(self.prompts), limits.max_prompts, "prompts", "prompt")
        if not self.prompts:
            raise invalid("The prompt is empty.", "prompt")
        for number, prompt in enumerate(self.prompts):
            if len(prompt) == 0:
                raise invalid("The prompt is empty.", self.place(number))

    @property
    def prompts(self) -> Sequence[PromptText]:
        prompt = self.prompt
        is_one = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
        return cast(Sequence[PromptText], [prompt] if is_one else prompt)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def place(self, number: int) -> str:
        """Return the name of the prompt with this index, for error messages."""
        return "prompt" if len(self.prompts) == 1 else f"prompt[{number}]"

    @property
    def asked_length(self) -> tuple[int | None, str]:
        """As in OpenAI's API, the default is not all tokens that fit."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens, "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs(self) -> int | None:
        """For an echo without an answer it is a number, because the engine needs a report."""
        if not self.echo:
            return None
        return 0 if self.logprobs is None and self.max_tokens == 0 else self.logprobs


Row = tuple[int, TokenLogprobs | None, int]
"""A token's id, its log-probabilities if known, and its offset in the text."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts that the response must repeat (echo) before their answers."""

    prompts: tuple[EncodedText, ...]
    logprobs: bool
    """True if the log-probabilities of the prompts' tokens must be reported."""


@dataclass(slots=True)
class TextAnswer:
    """Text completions, streamed or whole. Each prompt has ``response_options.choices`` answers."""

    stream_form: ClassVar[StreamForm] = EVENTS

    metadata: ResponseMetadata
    token_bytes: TokenText
    response_options: ResponseOptions
    prompts: int = 1
    echo: Echo | None = None
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    """The token ids of each prompt, if the response must contain token ids."""
    _begun: set[int] = field(default_factory=set)
    """Indices of the choices that have begun with the echoed prompt."""
    _choices: list[Json] = field(init=False)
    """What all chunks of each choice (one of several answers to a prompt) say together."""

    def __post_init__(self) -> None:
        self._choices = [{} for _ in range(self.prompts * self.response_options.choices)]

    def first_chunks(self) -> list[Json]:
        return []

    def chunks(self, delta: Delta) -> list[Json]:
        """Return one chunk, or an empty list if there is nothing to send."""
        choice = self._next_part(delta)
        if not (choice["text"] or choice["logprobs"] or delta.finish or self.prompt_ids):
            return []
        chunk = self.metadata.object("text_completion", [choice])
        return [chunk | {"usage": None} if self.response_options.include_usage else chunk]

    def last_chunks(self, usage: Usage) -> list[Json]:
        return usage_chunks(self.metadata, "text_completion", usage, self.response_options)

    @staticmethod
    def failure(error: ApiError) -> Json:
        return error.late_body()

    def add(self, delta: Delta) -> None:
        extend(self._choices[delta.index], self._next_part(delta))

    def whole(self, usage: Usage) -> Json:
        prompt = {"prompt_token_ids": self.prompt_ids[0]} if len(self.prompt_ids) == 1 else {}
        return (
            self.metadata.object("text_completion", self._choices)
            | prompt
            | {"usage": usage_object(usage, self.response_options.cache_report)}
        )

    def _next_part(self, delta: Delta) -> Json:
        """Return a choice with a delta's text and log-probabilities. The first one begins with the
        echoed prompt and the prompt's log-probabilities and ids, if the request wants them."""
        index, is_first = delta.index, delta.index not in self._begun
        self._begun.add(index)
        text = "".join(piece.text for piece in delta.pieces if isinstance(piece, TextPiece))
        rows = list(self._rows(delta))
        if self.echo is not None and is_first:
            prompt = self._prompt(index)
            text = prompt.text + text
            if self.echo.logprobs:
                rows = [*zip(prompt.ids, delta.prompt, prompt.offsets, strict=True), *rows]
        logprobs = self._text_logprobs(rows) if rows else None
        ids: Json = {}
        if self.prompt_ids:
            ids["token_ids"] = delta.token_ids
        if self.prompt_ids and is_first:
            ids["prompt_token_ids"] = self.prompt_ids[index // self.response_options.choices]
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish}
        return choice | ids

    def _prompt(self, index: int) -> EncodedText:
        assert self.echo is not None
        return self.echo.prompts[index // self.response_options.choices]

    def _rows(self, delta: Delta) -> Iterator[Row]:
        before = len(self._prompt(delta.index).text) if self.echo is not None else 0
        for report in delta.tokens:
            yield report.token_id, report.logprobs, before + report.offset

    def _text_logprobs(self, rows: list[Row]) -> Json:
        return {
            "tokens": [self._text_of(token) for token, _, _ in rows],
            "token_logprobs": [logprobs and logprobs.logprob for _, logprobs, _ in rows],
            "top_logprobs": [
                logprobs and self._top(token, logprobs) for token, logprobs, _ in rows
            ],
            "text_offset": [offset for _, _, offset in rows],
        }

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return log-probabilities by token text. If tokens share a text, take the likeliest."""
        best: dict[str, float] = {}
        for token, value in (*logprobs.top, (token_id, logprobs.logprob)):
            best.setdefault(self._text_of(token), value)
        return best

    def _text_of(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")
