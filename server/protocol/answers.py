"""Deltas of an answer -> the objects that OpenAI clients read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server.generation import Delta, TokenReport, Usage
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


def usage_object(usage: Usage) -> Json:
    """Token counts; nothing comes from a prefix cache yet, so cached_tokens is truly 0."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


@dataclass(slots=True)
class ChatAnswer:
    """One chat completion, streamed or whole."""

    heading: Heading
    token_bytes: TokenText
    include_usage: bool = False
    _content: str = ""
    _reasoning: str = ""
    _logprobs: list[Json] = field(default_factory=list)
    _finish: str | None = None

    def first_chunk(self) -> Json:
        """Says who speaks; sent before anything is generated."""
        return self._chunk({"role": "assistant", "content": ""}, None, None)

    def chunks(self, delta: Delta) -> list[Json]:
        """The chunks of a delta, with the finish reason in one of its own."""
        chunks: list[Json] = []
        logprobs = _chat_logprobs(delta.tokens, self.token_bytes)
        for piece in delta.pieces:
            chunks.append(self._chunk(_chat_fields(piece.part, piece.text), logprobs, None))
            logprobs = None
        if logprobs:
            chunks.append(self._chunk({}, logprobs, None))
        if delta.finish is not None:
            chunks.append(self._chunk({}, None, delta.finish))
        return chunks

    def last_chunk(self, usage: Usage) -> Json | None:
        """Usage, where it was asked for."""
        if not self.include_usage:
            return None
        return self.heading.object("chat.completion.chunk", []) | {"usage": usage_object(usage)}

    def add(self, delta: Delta) -> None:
        """Gathers a delta for ``whole``."""
        for piece in delta.pieces:
            if piece.part is Part.REASONING:
                self._reasoning += piece.text
            else:
                self._content += piece.text
        self._logprobs += (_chat_logprobs(delta.tokens, self.token_bytes) or {}).get("content", [])
        self._finish = delta.finish or self._finish

    def whole(self, usage: Usage) -> Json:
        """The answer in one object."""
        message: Json = {"role": "assistant", "content": self._content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
            message["reasoning"] = self._reasoning
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": self._logprobs, "refusal": None} if self._logprobs else None,
            "finish_reason": self._finish,
        }
        return self.heading.object("chat.completion", [choice]) | {"usage": usage_object(usage)}

    def _chunk(self, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = self.heading.object("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.include_usage else chunk


@dataclass(slots=True)
class TextAnswer:
    """One text completion, streamed or whole."""

    heading: Heading
    token_bytes: TokenText
    include_usage: bool = False
    _text: str = ""
    _logprobs: Json | None = None
    _offset: int = 0
    _finish: str | None = None

    def first_chunk(self) -> Json | None:
        """Nothing needs to be said first."""
        return None

    def chunks(self, delta: Delta) -> list[Json]:
        """One chunk, or none when there is nothing to say."""
        text = "".join(piece.text for piece in delta.pieces)
        logprobs = self._text_logprobs(delta.tokens)
        if not text and logprobs is None and delta.finish is None:
            return []
        return [self._chunk(text, logprobs, delta.finish)]

    def last_chunk(self, usage: Usage) -> Json | None:
        """Usage, where it was asked for."""
        if not self.include_usage:
            return None
        return self.heading.object("text_completion", []) | {"usage": usage_object(usage)}

    def add(self, delta: Delta) -> None:
        """Gathers a delta for ``whole``."""
        self._text += "".join(piece.text for piece in delta.pieces)
        more = self._text_logprobs(delta.tokens)
        if more is not None:
            so_far = self._logprobs or {name: [] for name in more}
            self._logprobs = {name: so_far[name] + more[name] for name in more}
        self._finish = delta.finish or self._finish

    def whole(self, usage: Usage) -> Json:
        """The answer in one object."""
        choice = _text_choice(self._text, self._logprobs, self._finish)
        return self.heading.object("text_completion", [choice]) | {"usage": usage_object(usage)}

    def _chunk(self, text: str, logprobs: Json | None, finish: str | None) -> Json:
        chunk = self.heading.object("text_completion", [_text_choice(text, logprobs, finish)])
        return chunk | {"usage": None} if self.include_usage else chunk

    def _text_logprobs(self, tokens: list[TokenReport]) -> Json | None:
        """The parallel lists of the older format; offsets count characters of the answer."""
        if not tokens:
            return None
        texts = [self._text_of(report.token_id) for report in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [report.logprobs.logprob for report in tokens],
            "top_logprobs": [
                {self._text_of(token): value for token, value in report.logprobs.top}
                for report in tokens
            ],
            "text_offset": offsets,
        }

    def _text_of(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


Answer = ChatAnswer | TextAnswer


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


def _text_choice(text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
