"""Deltas of an answer -> the objects that OpenAI clients read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.types import PrefixReport
from server.generation import Delta, TokenReport, Usage
from server.protocol.common import Wanted
from server.text.parser import Part

TokenText = Callable[[int], bytes]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Heading:
    """What all objects of one answer repeat."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str

    def object(self, kind: str, choices: list[Json]) -> Json:
        """An object of that kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_object(usage: Usage, cache_report: bool) -> Json:
    """Token counts. cache_report: with what the cache lacked, where it lacked anything."""
    details: Json = {"cached_tokens": usage.prefix.cached_tokens if usage.prefix else 0}
    if cache_report:
        details["cache_miss"] = _cache_miss(usage.prefix)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def _cache_miss(prefix: PrefixReport | None) -> Json | None:
    if prefix is None or prefix.miss is None:
        return None
    return {"left_at": prefix.left_at, "reason": prefix.miss.value}


@dataclass(slots=True)
class _ChatChoice:
    """What has been gathered of a choice."""

    content: str = ""
    reasoning: str = ""
    logprobs: list[Json] = field(default_factory=list)
    finish: str | None = None

    def object(self, index: int) -> Json:
        message: Json = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
            message["reasoning"] = self.reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": self.logprobs, "refusal": None} if self.logprobs else None,
            "finish_reason": self.finish,
        }


@dataclass(slots=True)
class ChatAnswer:
    """One chat completion, streamed or whole."""

    heading: Heading
    token_bytes: TokenText
    wanted: Wanted
    _choices: list[_ChatChoice] = field(init=False)

    def __post_init__(self) -> None:
        self._choices = [_ChatChoice() for _ in range(self.wanted.choices)]

    def first_chunks(self) -> list[Json]:
        """Say who speaks; sent before anything is generated."""
        return [
            self._chunk(index, {"role": "assistant", "content": ""}, None, None)
            for index in range(self.wanted.choices)
        ]

    def chunks(self, delta: Delta) -> list[Json]:
        """The chunks of a delta, with the finish reason in one of its own."""
        chunks: list[Json] = []
        index = delta.index
        logprobs = _chat_logprobs(delta.tokens, self.token_bytes)
        for piece in delta.pieces:
            fields = _chat_fields(piece.part, piece.text)
            chunks.append(self._chunk(index, fields, logprobs, None))
            logprobs = None
        if logprobs:
            chunks.append(self._chunk(index, {}, logprobs, None))
        if delta.finish is not None:
            chunks.append(self._chunk(index, {}, None, delta.finish))
        return chunks

    def last_chunk(self, usage: Usage) -> Json | None:
        """Usage, where it was asked for."""
        return _usage_chunk(self.heading, "chat.completion.chunk", usage, self.wanted)

    def add(self, delta: Delta) -> None:
        """Gathers a delta for ``whole``."""
        choice = self._choices[delta.index]
        for piece in delta.pieces:
            if piece.part is Part.REASONING:
                choice.reasoning += piece.text
            else:
                choice.content += piece.text
        logprobs = _chat_logprobs(delta.tokens, self.token_bytes)
        choice.logprobs += (logprobs or {}).get("content", [])
        choice.finish = delta.finish or choice.finish

    def whole(self, usage: Usage) -> Json:
        """The answer in one object."""
        choices = [choice.object(index) for index, choice in enumerate(self._choices)]
        return self.heading.object("chat.completion", choices) | {
            "usage": usage_object(usage, self.wanted.cache_report)
        }

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = self.heading.object("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.wanted.include_usage else chunk


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
        text = "".join(piece.text for piece in delta.pieces)
        logprobs = self._text_logprobs(delta)
        if not text and logprobs is None and delta.finish is None:
            return []
        choice = _text_choice(delta.index, text, logprobs, delta.finish)
        chunk = self.heading.object("text_completion", [choice])
        return [chunk | {"usage": None} if self.wanted.include_usage else chunk]

    def last_chunk(self, usage: Usage) -> Json | None:
        """Usage, where it was asked for."""
        return _usage_chunk(self.heading, "text_completion", usage, self.wanted)

    def add(self, delta: Delta) -> None:
        """Gathers a delta for ``whole``."""
        choice = self._choices[delta.index]
        choice.text += "".join(piece.text for piece in delta.pieces)
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


Answer = ChatAnswer | TextAnswer


def _usage_chunk(heading: Heading, kind: str, usage: Usage, wanted: Wanted) -> Json | None:
    if not wanted.include_usage:
        return None
    return heading.object(kind, []) | {"usage": usage_object(usage, wanted.cache_report)}


def _chat_fields(part: Part, text: str) -> Json:
    """Reasoning goes out under both names that clients read."""
    if part is Part.REASONING:
        return {"reasoning_content": text, "reasoning": text}
    return {"content": text}


def _chat_logprobs(tokens: list[TokenReport], token_bytes: TokenText) -> Json | None:
    if not tokens:
        return None

    def entry(token_id: int, logprob: float) -> Json:
        raw = token_bytes(token_id)
        return {
            "token": raw.decode(errors="replace"),
            "logprob": logprob,
            "bytes": list(raw),
        }

    return {
        "content": [
            entry(report.token_id, report.logprobs.logprob)
            | {"top_logprobs": [entry(token, value) for token, value in report.logprobs.top]}
            for report in tokens
        ],
        "refusal": None,
    }


def _text_choice(index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
