"""Deltas of an answer -> the objects of /api/chat and /api/generate."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from server.protocol.answers import Json, StreamForm, TokenText, token_objects
from server.protocol.gathered_call import GatheredCall
from server.protocol.ollama.card import time_from_ns
from server.protocol.ollama.errors import ollama_error
from server.protocol.wire_errors import ApiError
from server.text.pieces import AnswerPiece, Channel, Delta, ToolCallArguments, ToolCallStart, Usage

Kind = Literal["chat", "generate"]
TEXT = {"chat": "content", "generate": "response"}


@dataclass(frozen=True, slots=True)
class Durations:
    """How long an answer took, in seconds."""

    total_s: float
    """From the request to now."""
    prompt_s: float
    """From the request to the first token: in the queue, too."""
    answer_s: float
    """From the first token to the last."""


@dataclass(slots=True)
class OllamaAnswer:
    """One answer, streamed or whole."""

    stream_form: ClassVar[StreamForm] = StreamForm.LINES

    kind: Kind
    model: str
    token_bytes: TokenText
    durations: Callable[[], Durations]
    now_ns: Callable[[], int] = time.time_ns
    _call: GatheredCall | None = None
    _has_text: bool = False
    _texts: dict[str, list[str]] = field(default_factory=dict)
    _calls: list[Json] = field(default_factory=list)
    _logprobs: list[Json] = field(default_factory=list)
    _finish: str = "stop"

    def first_chunks(self) -> list[Json]:
        """Return an object without text."""
        return [self._object({})]

    def chunks(self, delta: Delta) -> list[Json]:
        """Return the objects of a delta; a call is in one when it is all there."""
        parts = self._parts(delta)
        logprobs = token_objects(delta.tokens, self.token_bytes)
        if logprobs and not parts:
            parts = [{}]
        chunks = [self._object(part) for part in parts]
        if logprobs:
            chunks[0]["logprobs"] = logprobs
        return chunks

    def last_chunks(self, usage: Usage) -> list[Json]:
        """Return the end: why, how many tokens, how long."""
        return [self._object({}) | self._end(usage)]

    def failure(self, error: ApiError) -> Json:
        """Return the error alone."""
        return ollama_error(error) | error.late_fields

    def add(self, delta: Delta) -> None:
        """Gather a delta for ``whole``."""
        for part in self._parts(delta):
            self._calls += part.pop("tool_calls", [])
            for name, text in part.items():
                self._texts.setdefault(name, []).append(text)
        self._logprobs += token_objects(delta.tokens, self.token_bytes)

    def whole(self, usage: Usage) -> Json:
        """Return the answer in one object."""
        said: Json = {name: "".join(texts) for name, texts in self._texts.items()}
        calls: Json = {"tool_calls": self._calls} if self._calls else {}
        logprobs: Json = {"logprobs": self._logprobs} if self._logprobs else {}
        return self._object(said | calls) | logprobs | self._end(usage)

    def nothing(self, *, unloads: bool) -> Json:
        """Return the answer to a request that only wants the model to be there, or not."""
        return self._object({}) | {"done": True, "done_reason": "unload" if unloads else "load"}

    def _object(self, part: Json) -> Json:
        """Make an object. part: of the message."""
        head = {"model": self.model, "created_at": time_from_ns(self.now_ns())}
        text = {TEXT[self.kind]: ""}
        if self.kind == "generate":
            return head | text | part | {"done": False}
        return head | {"message": {"role": "assistant"} | text | part, "done": False}

    def _end(self, usage: Usage) -> Json:
        spent = self.durations()
        return {
            "done": True,
            "done_reason": "length" if self._finish == "length" else "stop",
            "total_duration": nanoseconds(spent.total_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(spent.prompt_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(spent.answer_s),
        }

    def _parts(self, delta: Delta) -> list[Json]:
        """Return what a delta adds to the message."""
        parts = [part for piece in delta.pieces for part in self._fed(piece)]
        if delta.finish is not None:
            self._finish = delta.finish
            parts += self._ended_call()
        return parts

    def _fed(self, piece: AnswerPiece) -> list[Json]:
        if isinstance(piece, ToolCallArguments):
            assert self._call is not None, "arguments follow the start of their call"
            self._call.arguments += piece.text
            return []
        before = self._ended_call()
        if isinstance(piece, ToolCallStart):
            self._call = GatheredCall(piece)
            return before
        if piece.channel is Channel.REASONING:
            return [*before, {"thinking": piece.text}]
        return [*before, self._text(piece.text)]

    def _ended_call(self) -> list[Json]:
        """Return the call that is open, which has ended; one that nobody could make is text."""
        call, self._call = self._call, None
        if call is None:
            return []
        if call.input is None:
            return [self._text(("\n" if self._has_text else "") + call.text)]
        function = {"index": call.start.index, "name": call.start.name, "arguments": call.input}
        return [{"tool_calls": [{"id": call.start.id, "function": function}]}]

    def _text(self, text: str) -> Json:
        self._has_text = True
        return {TEXT[self.kind]: text}


def nanoseconds(seconds: float) -> int:
    """Return a duration as Ollama writes it."""
    return round(seconds * 10**9)
