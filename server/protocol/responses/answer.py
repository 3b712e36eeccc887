"""Deltas of an answer -> a response, and the events of /v1/responses."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from server.protocol.answers import (
    Json,
    ResponseMetadata,
    StreamForm,
    TokenText,
    usage_object,
    written_tokens,
)
from server.protocol.responses.output import Output
from server.protocol.wire_errors import ApiError
from server.text.conversation import Tool
from server.text.pieces import Delta, Usage


@dataclass(slots=True)
class ResponseAnswer:
    """One response, streamed or whole."""

    stream_form: ClassVar[StreamForm] = StreamForm.NAMED_EVENTS

    metadata: ResponseMetadata
    """Its id is ``resp_`` and what no other response has."""
    token_bytes: TokenText
    repeated: Json
    """What the response repeats of its request."""
    cache_report: bool = False
    packs_reasoning: bool = False
    tools: tuple[Tool, ...] = ()
    """Those that may be called."""
    keep: Callable[[Json], None] = lambda _: None
    """Gets the response when it has ended, unless the engine has failed."""
    _output: Output = field(init=False)
    _events: int = 0
    _finish: str = "stop"

    def __post_init__(self) -> None:
        key = self.metadata.id.removeprefix("resp_")
        self._output = Output(key, self.token_bytes, self.packs_reasoning, self.tools)

    def first_chunks(self) -> list[Json]:
        """Return the events of a response without output: created and in progress."""
        return [
            self._numbered({"type": f"response.{kind}", "response": self._object("in_progress")})
            for kind in ("created", "in_progress")
        ]

    def chunks(self, delta: Delta) -> list[Json]:
        events = [event for piece in delta.pieces for event in self._output.take(piece)]
        if delta.finish is not None:
            self._finish = delta.finish
            events += self._output.end(delta.finish)
        return [self._numbered(event) for event in events]

    def last_chunks(self, usage: Usage) -> list[Json]:
        response = self.whole(usage)
        event = {"type": f"response.{response['status']}", "response": response}
        return [self._numbered(event)]

    def failure(self, error: ApiError) -> Json:
        """Return the response as far as it has come."""
        response = self._object("failed") | {
            "output": self._output.items,
            "error": {"code": error.type, "message": error.message} | error.late_fields,
        }
        return self._numbered({"type": "response.failed", "response": response})

    def add(self, delta: Delta) -> None:
        """Gather a delta for ``whole``."""
        self.chunks(delta)

    def whole(self, usage: Usage) -> Json:
        cut = self._finish == "length"
        response = self._object("incomplete" if cut else "completed") | {
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": response_usage(usage, self.cache_report),
        }
        self.keep(response)
        return response

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


def response_usage(usage: Usage, cache_report: bool) -> Json:
    """Return token counts by this API's names."""
    counts = usage_object(usage, cache_report)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"]
        | {"cache_write_tokens": written_tokens(usage)},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }
