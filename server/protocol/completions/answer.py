"""Deltas of answers -> the objects of /v1/completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from engine.types import TokenLogprobs
from server.protocol.answers import (
    Json,
    ResponseMetadata,
    StreamForm,
    TokenText,
    usage_chunks,
    usage_object,
)
from server.protocol.common import ResponseOptions
from server.protocol.wire_errors import ApiError
from server.text.pieces import Delta, TextPiece, Usage
from server.text.tokenizer import EncodedText

Row = tuple[int, TokenLogprobs | None, int]
"""A token, its log-probabilities, and the characters before the one that it begins in."""


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompts, each of which stands before its answers."""

    prompts: tuple[EncodedText, ...]
    logprobs: bool
    """Whether log-probabilities of their tokens are reported."""


@dataclass(slots=True)
class _TextChoice:
    """What has been gathered of a choice."""

    begun: bool = False
    """Whether its prompt has been echoed."""
    text: str = ""
    logprobs: Json | None = None
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class TextAnswer:
    """One text completion, streamed or whole, ``response_options.choices`` of each prompt."""

    stream_form: ClassVar[StreamForm] = StreamForm.EVENTS

    metadata: ResponseMetadata
    token_bytes: TokenText
    response_options: ResponseOptions
    prompts: int = 1
    echo: Echo | None = None
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    """The tokens of each prompt, where they and the answers' are to be told."""
    _choices: list[_TextChoice] = field(init=False)

    def __post_init__(self) -> None:
        self._choices = [_TextChoice() for _ in range(self.prompts * self.response_options.choices)]

    def first_chunks(self) -> list[Json]:
        """Return nothing: no chunk comes before the first delta."""
        return []

    def chunks(self, delta: Delta) -> list[Json]:
        """Return one chunk, or none when there is nothing to send."""
        begun = self._choices[delta.index].begun
        text, logprobs = self._grown(delta)
        if not text and logprobs is None and delta.finish is None and not self.prompt_ids:
            return []
        choice = _text_choice(delta.index, text, logprobs, delta.finish)
        choice |= self._ids(delta.index, delta.token_ids, with_prompt=not begun)
        chunk = self.metadata.object("text_completion", [choice])
        return [chunk | {"usage": None} if self.response_options.include_usage else chunk]

    def last_chunks(self, usage: Usage) -> list[Json]:
        """Return usage, where it was asked for."""
        return usage_chunks(self.metadata, "text_completion", usage, self.response_options)

    def failure(self, error: ApiError) -> Json:
        """Return the error alone."""
        return error.late_body()

    def add(self, delta: Delta) -> None:
        """Gather a delta for ``whole``."""
        text, more = self._grown(delta)
        choice = self._choices[delta.index]
        choice.text += text
        if more is not None:
            so_far = choice.logprobs or {name: [] for name in more}
            choice.logprobs = {name: so_far[name] + more[name] for name in more}
        choice.finish = delta.finish or choice.finish
        choice.token_ids += delta.token_ids

    def whole(self, usage: Usage) -> Json:
        """Return the answers in one object."""
        choices = [
            _text_choice(index, choice.text, choice.logprobs, choice.finish)
            | self._ids(index, choice.token_ids)
            for index, choice in enumerate(self._choices)
        ]
        prompt = {"prompt_token_ids": self.prompt_ids[0]} if len(self.prompt_ids) == 1 else {}
        return (
            self.metadata.object("text_completion", choices)
            | prompt
            | {"usage": usage_object(usage, self.response_options.cache_report)}
        )

    def _ids(self, index: int, ids: Sequence[int], *, with_prompt: bool = True) -> Json:
        """Return the tokens of a choice, and of its prompt, where they are to be told."""
        if not self.prompt_ids:
            return {}
        prompt = self.prompt_ids[index // self.response_options.choices]
        return {"token_ids": ids} | ({"prompt_token_ids": prompt} if with_prompt else {})

    def _grown(self, delta: Delta) -> tuple[str, Json | None]:
        """Return what a delta adds to its choice; the first one, where prompts are echoed, the
        prompt."""
        text = "".join(piece.text for piece in delta.pieces if isinstance(piece, TextPiece))
        rows = list(self._rows(delta))
        choice = self._choices[delta.index]
        if self.echo is not None and not choice.begun:
            prompt = self._prompt(delta.index)
            text = prompt.text + text
            if self.echo.logprobs:
                rows = [*zip(prompt.ids, delta.prompt, prompt.offsets, strict=True), *rows]
        choice.begun = True
        return text, self._text_logprobs(rows) if rows else None

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
        """Return the likeliest tokens and the token itself. Of several with the same text the
        likeliest counts."""
        best: dict[str, float] = {}
        for token, value in (*logprobs.top, (token_id, logprobs.logprob)):
            best.setdefault(self._text_of(token), value)
        return best

    def _text_of(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


def _text_choice(index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
