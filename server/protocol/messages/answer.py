"""Convert deltas, the generated parts of an answer, to a stream or one object of /v1/messages."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from engine.types import PrefixReport
from server.protocol.answers import (
    NAMED_EVENTS,
    GatheredCall,
    Json,
    ResponseMetadata,
    StreamForm,
    cache_miss,
    written_tokens,
)
from server.protocol.common import current_request_id
from server.protocol.wire_errors import ApiError, ContextOverflowError
from server.text.conversation import Channel
from server.text.json_object import json_object
from server.text.pieces import AnswerPiece, Delta, ToolCallArguments, ToolCallStart, Usage

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def message_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return Anthropic's error object, whose message contains the name of the parameter."""
    otherwise = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if isinstance(error, ContextOverflowError):
        message = error.anthropic_message
    elif error.param is not None and not message.startswith(error.param):
        message = f"{error.param}: {message}"
    return {
        "type": "error",
        "error": {"type": TYPES.get(error.status, otherwise), "message": message},
        "request_id": request_id,
    }


# Clients drop reasoning without a signature. quire ignores signatures that clients send back.
SIGNATURE = "quire"
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
PING: Json = {"type": "ping"}


@dataclass(slots=True)
class _Blocks:
    """Converts an answer's pieces to events of Anthropic's content blocks.

    At most one block is open. A tool call is sent when it is complete. If the arguments of a call
    are no JSON object, the call becomes text."""

    used_tools: bool = False
    _count: int = 0
    _kind: str | None = None
    """The type of the content block that is open, if any."""
    _call: GatheredCall | None = None

    def feed(self, piece: AnswerPiece) -> list[Json]:
        if isinstance(piece, ToolCallArguments):
            assert self._call is not None, "arguments follow the start of their call"
            self._call.arguments += piece.text
            return []
        events = self._end_call()
        if isinstance(piece, ToolCallStart):
            self._call = GatheredCall(piece)
            return events
        if piece.channel is Channel.REASONING:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            delta = {"type": "thinking_delta", "thinking": piece.text}
            return [*events, *self._open("thinking", block), self._delta(delta)]
        return events + self._text(piece.text)

    def end(self) -> list[Json]:
        return self._end_call() + self._close()

    def _end_call(self) -> list[Json]:
        call, self._call = self._call, None
        if call is None:
            return []
        if call.input is None:
            return self._text(("\n" if self._kind == "text" else "") + call.text)
        self.used_tools = True
        block = {"type": "tool_use", "id": call.start.id, "name": call.start.name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return [*self._open("tool_use", block), self._delta(delta)]

    def _text(self, text: str) -> list[Json]:
        block = {"type": "text", "text": ""}
        return [*self._open("text", block), self._delta({"type": "text_delta", "text": text})]

    def _open(self, kind: str, block: Json) -> list[Json]:
        """Return the events that open a block, unless an open block of this kind can continue."""
        if kind == self._kind != "tool_use":
            return []
        events = self._close()
        self._kind = kind
        start = {"type": "content_block_start", "index": self._count, "content_block": block}
        return [*events, start]

    def _close(self) -> list[Json]:
        kind, self._kind = self._kind, None
        if kind is None:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": SIGNATURE})]
        stop = {"type": "content_block_stop", "index": self._count}
        events = [*(signed if kind == "thinking" else []), stop]
        self._count += 1
        return events

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._count, "delta": delta}


@dataclass(slots=True)
class MessageAnswer:
    """One message, streamed or whole. The whole message is built from the stream's events.

    The prompt's token counts must be right in message_start, because Claude Code does not let a 0
    in message_delta replace them. So if ``counts_cache``, message_start waits for the first delta,
    which tells how much of the prompt came from the cache."""

    stream_form: ClassVar[StreamForm] = NAMED_EVENTS

    metadata: ResponseMetadata
    prompt_tokens: int
    kept_tokens: int
    """The number of prompt tokens that are in the prefix cache after the request."""
    counts_cache: bool = False
    """True if input_tokens must exclude tokens read from or written to the cache."""
    context_ends_it: bool = False
    """True if the context length leaves fewer tokens than the request's max_tokens."""
    cache_report: bool = False
    _begun: bool = False
    _blocks: _Blocks = field(default_factory=_Blocks)
    _content: list[Json] = field(default_factory=list)
    _end: Json = field(default_factory=lambda: {"stop_reason": None, "stop_sequence": None})

    def first_chunks(self) -> list[Json]:
        """Return the events that begin a message, unless they wait for the first delta."""
        return [] if self.counts_cache else self._begin(None)

    def _begin(self, prefix: PrefixReport | None) -> list[Json]:
        self._begun = True
        usage = self._usage(Usage(self.prompt_tokens, 0, 0, prefix, self.kept_tokens))
        return [{"type": "message_start", "message": self._message([], usage)}, PING]

    def chunks(self, delta: Delta) -> list[Json]:
        events = [] if self._begun else self._begin(delta.prefix)
        events += [event for piece in delta.pieces for event in self._blocks.feed(piece)]
        if delta.finish is None:
            return events
        events += self._blocks.end()
        reason = STOP_REASONS[delta.finish]
        if delta.finish == "stop" and delta.stop_string is not None:
            reason = "stop_sequence"
        elif delta.finish == "tool_calls" and not self._blocks.used_tools:
            reason = "end_turn"
        elif delta.finish == "length" and self.context_ends_it:
            reason = "model_context_window_exceeded"
        stop_string = delta.stop_string if reason == "stop_sequence" else None
        self._end = {"stop_reason": reason, "stop_sequence": stop_string}
        return events

    def last_chunks(self, usage: Usage) -> list[Json]:
        end = {"type": "message_delta", "delta": self._end, "usage": self._usage(usage)}
        return [end, {"type": "message_stop"}]

    @staticmethod
    def failure(error: ApiError) -> Json:
        body = message_error(error, current_request_id())
        body["error"] |= error.late_fields
        return body

    def add(self, delta: Delta) -> None:
        add_events(self._content, self.chunks(delta))

    def whole(self, usage: Usage) -> Json:
        return self._message(self._content, self._usage(usage))

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": self.metadata.id,
            "type": "message",
            "role": "assistant",
            "model": self.metadata.model,
            "content": content,
            **self._end,
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> Json:
        """Return token counts. With ``counts_cache``, input_tokens excludes tokens read from or
        written to the cache."""
        cached = written = 0
        if self.counts_cache:
            cached = usage.prefix.cached_tokens if usage.prefix else 0
            written = written_tokens(usage)
        counts: Json = {
            "input_tokens": usage.prompt_tokens - cached - written,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": written,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }
        return counts | ({"cache_miss": cache_miss(usage.prefix)} if self.cache_report else {})


def add_events(content: list[Json], events: Iterable[Json]) -> None:
    for event in events:
        if event["type"] == "content_block_start":
            content.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            block, delta = content[event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json_object(delta["partial_json"])
            else:
                (name,) = delta.keys() - {"type"}
                block[name] += delta[name]
