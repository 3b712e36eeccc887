"""Deltas of an answer -> the objects of /v1/completions."""

from dataclasses import dataclass, field
from typing import ClassVar

from server.generation import Delta, Usage
from server.protocol.answers import Heading, Json, TokenText, usage_chunks, usage_object
from server.protocol.common import Wanted
from server.protocol.errors import ApiError
from server.text.pieces import Piece


@dataclass(slots=True)
class _TextChoice:
    """What has been gathered of a choice."""

    text: str = ""
    logprobs: Json | None = None
    offset: int = 0
    """Characters of the tokens whose log-probabilities have been reported."""
    finish: str | None = None


@dataclass(slots=True)
class TextAnswer:
    """One text completion, streamed or whole."""

    events_have_names: ClassVar[bool] = False

    heading: Heading
    token_bytes: TokenText
    wanted: Wanted
    _choices: list[_TextChoice] = field(init=False)

    def __post_init__(self) -> None:
        self._choices = [_TextChoice() for _ in range(self.wanted.choices)]

    def first_chunks(self) -> list[Json]:
        """Nothing needs to be said first."""
        return []

    def chunks(self, delta: Delta) -> list[Json]:
        """One chunk, or none when there is nothing to say."""
        text = _text(delta)
        logprobs = self._text_logprobs(delta)
        if not text and logprobs is None and delta.finish is None:
            return []
        choice = _text_choice(delta.index, text, logprobs, delta.finish)
        chunk = self.heading.object("text_completion", [choice])
        return [chunk | {"usage": None} if self.wanted.include_usage else chunk]

    def last_chunks(self, usage: Usage) -> list[Json]:
        """Usage, where it was asked for."""
        return usage_chunks(self.heading, "text_completion", usage, self.wanted)

    def failure(self, error: ApiError) -> Json:
        """The error alone."""
        return error.body()

    def add(self, delta: Delta) -> None:
        """Gathers a delta for ``whole``."""
        choice = self._choices[delta.index]
        choice.text += _text(delta)
        more = self._text_logprobs(delta)
        if more is not None:
            so_far = choice.logprobs or {name: [] for name in more}
            choice.logprobs = {name: so_far[name] + more[name] for name in more}
        choice.finish = delta.finish or choice.finish

    def whole(self, usage: Usage) -> Json:
        """The answer in one object."""
        choices = [
            _text_choice(index, choice.text, choice.logprobs, choice.finish)
            for index, choice in enumerate(self._choices)
        ]
        return self.heading.object("text_completion", choices) | {
            "usage": usage_object(usage, self.wanted.cache_report)
        }

    def _text_logprobs(self, delta: Delta) -> Json | None:
        """The parallel lists of the older format; offsets count characters of the choice."""
        if not delta.tokens:
            return None
        choice = self._choices[delta.index]
        texts = [self._text_of(report.token_id) for report in delta.tokens]
        offsets = []
        for text in texts:
            offsets.append(choice.offset)
            choice.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [report.logprobs.logprob for report in delta.tokens],
            "top_logprobs": [
                {self._text_of(token): value for token, value in report.logprobs.top}
                for report in delta.tokens
            ],
            "text_offset": offsets,
        }

    def _text_of(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


def _text(delta: Delta) -> str:
    """A delta of an answer that is not parsed is all content."""
    return "".join(piece.text for piece in delta.pieces if isinstance(piece, Piece))


def _text_choice(index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
