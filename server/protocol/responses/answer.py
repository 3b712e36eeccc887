"""Convert deltas, the generated parts of an answer, to a stream or one object of /v1/responses."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from server.protocol.answers import (
    NAMED_EVENTS,
    Json,
    ResponseMetadata,
    StreamForm,
    TokenText,
    token_objects,
    usage_object,
    written_tokens,
)
from server.protocol.responses.items import packed_reasoning
from server.protocol.responses.tools import name_object
from server.protocol.wire_errors import ApiError
from server.text.conversation import Channel, Tool
from server.text.json_object import json_object
from server.text.pieces import AnswerPiece, Delta, TextPiece, ToolCallStart, Usage

Status = Literal["in_progress", "completed", "incomplete"]


class TextItem:
    """An output item for reasoning or text, which grows while the answer streams."""

    def __init__(
        self, id: str, channel: Channel, token_bytes: TokenText, packs_reasoning: bool
    ) -> None:
        self._id = id
        self._thinks = channel is Channel.REASONING
        self._token_bytes = token_bytes
        self._packs_reasoning = packs_reasoning
        self._event = "reasoning_text" if self._thinks else "output_text"
        self._text = ""
        self._logprobs: list[Json] = []

    def takes(self, piece: AnswerPiece) -> bool:
        return isinstance(piece, TextPiece) and (piece.channel is Channel.REASONING) == self._thinks

    def open(self) -> list[Json]:
        item = self._object("in_progress", [])
        return [
            {"type": "response.output_item.added", "item": item},
            self._of_part("response.content_part.added") | {"part": self._part()},
        ]

    def grow(self, piece: AnswerPiece) -> list[Json]:
        assert isinstance(piece, TextPiece)
        self._text += piece.text
        delta = self._of_part(f"response.{self._event}.delta") | {"delta": piece.text}
        if not self._thinks:
            delta["logprobs"] = token_objects(piece.tokens, self._token_bytes)
            self._logprobs += delta["logprobs"]
        return [delta]

    def close(self, status: Status) -> list[Json]:
        done = self._of_part(f"response.{self._event}.done") | {"text": self._text}
        if not self._thinks:
            done["logprobs"] = self._logprobs
        return [
            done,
            self._of_part("response.content_part.done") | {"part": self._part()},
            {"type": "response.output_item.done", "item": self.object(status)},
        ]

    def object(self, status: Status) -> Json:
        return self._object(status, [self._part()])

    def _object(self, status: Status, content: list[Json]) -> Json:
        item = {"id": self._id, "status": status, "content": content}
        if not self._thinks:
            return {"type": "message", "role": "assistant", **item}
        packed = (
            {"encrypted_content": packed_reasoning(self._text)} if self._packs_reasoning else {}
        )
        return {"type": "reasoning", **item, "summary": [], **packed}

    def _part(self) -> Json:
        part: Json = {"type": self._event, "text": self._text}
        if not self._thinks:
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part

    def _of_part(self, type: str) -> Json:
        return {"type": type, "item_id": self._id, "content_index": 0}


class CallItem:
    """An output item of a tool call with growing arguments."""

    def __init__(self, id: str, start: ToolCallStart, names: Json) -> None:
        """``names`` has the function's name and namespace as the client wrote them."""
        self._id = id
        self._start = start
        self._names = names
        self._arguments = ""

    def takes(self, piece: AnswerPiece) -> bool:
        return not isinstance(piece, TextPiece | ToolCallStart)

    def open(self) -> list[Json]:
        return [{"type": "response.output_item.added", "item": self.object("in_progress")}]

    def grow(self, piece: AnswerPiece) -> list[Json]:
        assert not isinstance(piece, TextPiece | ToolCallStart)
        self._arguments += piece.text
        kind = "response.function_call_arguments.delta"
        return [{"type": kind, "item_id": self._id, "delta": piece.text}]

    def close(self, status: Status) -> list[Json]:
        done = {
            "type": "response.function_call_arguments.done",
            "item_id": self._id,
            "name": self._names["name"],
            "arguments": self._arguments,
        }
        return [done, {"type": "response.output_item.done", "item": self.object(status)}]

    def object(self, status: Status) -> Json:
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._start.id,
            **self._names,
            "arguments": self._arguments,
            "status": status,
        }


class SearchItem(CallItem):
    """A call of the client's tool search. No events are sent for partial arguments."""

    def grow(self, piece: AnswerPiece) -> list[Json]:
        super().grow(piece)
        return []

    def close(self, status: Status) -> list[Json]:
        return super().close(status)[1:]

    def object(self, status: Status) -> Json:
        return {
            "type": "tool_search_call",
            "id": self._id,
            "call_id": self._start.id,
            "execution": "client",
            "arguments": json_object(self._arguments) or {},
            "status": status,
        }


@dataclass(slots=True)
class ResponseAnswer:
    """One response, streamed or whole."""

    stream_form: ClassVar[StreamForm] = NAMED_EVENTS

    metadata: ResponseMetadata
    """The metadata of the response. The id is ``resp_`` and a key unique to the response."""
    token_bytes: TokenText
    repeated: Json
    """The request's fields that the response repeats."""
    cache_report: bool = False
    packs_reasoning: bool = False
    tools: tuple[Tool, ...] = ()
    keep: Callable[[Json], None] = lambda _: None
    """A function that is called with the complete response, unless the engine has failed."""
    _done: list[Json] = field(default_factory=list)
    _open: TextItem | CallItem | None = None
    _events: int = 0
    _finish: str = "stop"

    def first_chunks(self) -> list[Json]:
        return [
            self._numbered({"type": f"response.{kind}", "response": self._object("in_progress")})
            for kind in ("created", "in_progress")
        ]

    def chunks(self, delta: Delta) -> list[Json]:
        events = [event for piece in delta.pieces for event in self.take(piece)]
        if delta.finish is not None:
            self._finish = delta.finish
            events += self.end(delta.finish)
        return [self._numbered(event) for event in events]

    def last_chunks(self, usage: Usage) -> list[Json]:
        response = self.whole(usage)
        event = {"type": f"response.{response['status']}", "response": response}
        return [self._numbered(event)]

    def failure(self, error: ApiError) -> Json:
        """Return the last event of a failed response, with the output until the failure."""
        response = self._object("failed") | {
            "output": self.items,
            "error": {"code": error.type, "message": error.message} | error.late_fields,
        }
        return self._numbered({"type": "response.failed", "response": response})

    def add(self, delta: Delta) -> None:
        self.chunks(delta)

    def whole(self, usage: Usage) -> Json:
        cut = self._finish == "length"
        response = self._object("incomplete" if cut else "completed") | {
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.items,
            "usage": response_usage(usage, self.cache_report),
        }
        self.keep(response)
        return response

    @property
    def items(self) -> list[Json]:
        """All output items. An item that still grows has the status "incomplete"."""
        return self._done + ([self._open.object("incomplete")] if self._open else [])

    def take(self, piece: AnswerPiece) -> list[Json]:
        events: list[Json] = []
        if self._open is None or not self._open.takes(piece):
            events = self._close("completed")
            item = self._open = self._new(piece)
            events += self._place(item.open())
        if not isinstance(piece, ToolCallStart):
            events += self._place(self._open.grow(piece))
        return events

    def end(self, finish: str) -> list[Json]:
        """End the output and return the last events."""
        events: list[Json] = []
        if not self.items:
            events = self.take(TextPiece(Channel.CONTENT, ""))
        # At the finish reason "tool_calls", an open call is complete. At "stop", it is incomplete.
        cut = finish == "length" or (finish == "stop" and isinstance(self._open, CallItem))
        return events + self._close("incomplete" if cut else "completed")

    def _new(self, piece: AnswerPiece) -> TextItem | CallItem:
        number = f"{self.metadata.id.removeprefix('resp_')}{len(self._done):04x}"
        if isinstance(piece, ToolCallStart):
            tools = (tool for tool in self.tools if tool.name == piece.name)
            tool = next(tools, Tool(piece.name))
            item = SearchItem if tool.searches else CallItem
            return item(f"fc_{number}", piece, name_object(tool))
        assert isinstance(piece, TextPiece), "arguments follow their call"
        prefix = "rs" if piece.channel is Channel.REASONING else "msg"
        id = f"{prefix}_{number}"
        return TextItem(id, piece.channel, self.token_bytes, self.packs_reasoning)

    def _close(self, status: Status) -> list[Json]:
        if self._open is None:
            return []
        events = self._place(self._open.close(status))
        self._done.append(self._open.object(status))
        self._open = None
        return events

    def _place(self, events: list[Json]) -> list[Json]:
        return [event | {"output_index": len(self._done)} for event in events]

    def _object(self, status: str) -> Json:
        return {
            "id": self.metadata.id,
            "object": "response",
            "created_at": self.metadata.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.metadata.model,
            "output": [],
            "usage": None,
            **self.repeated,
        }

    def _numbered(self, event: Json) -> Json:
        number, self._events = self._events, self._events + 1
        return event | {"sequence_number": number}


def error_event(error: ApiError, number: int) -> Json:
    """Return the event with which a stream fails after ``number`` events, but before a response."""
    fields = {"code": error.code, "message": error.message, "param": error.param}
    return {"type": "error", **fields, **error.late_fields, "sequence_number": number}


def response_usage(usage: Usage, cache_report: bool) -> Json:
    counts = usage_object(usage, cache_report)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"]
        | {"cache_write_tokens": written_tokens(usage)},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": counts["total_tokens"],
    }
