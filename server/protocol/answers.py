"""Parts of answers that several endpoints share."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from engine.types import PrefixReport
from server.protocol.common import ResponseOptions
from server.protocol.wire_errors import ApiError
from server.text.calls.tool_format import CALL_OPEN
from server.text.json_object import json_object
from server.text.pieces import Delta, TokenReport, ToolCallStart, Usage

TokenText = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class StreamForm:
    """The text format of a stream of JSON objects. Server-sent events by default."""

    media_type: str = "text/event-stream"
    before: bytes = b"data: "
    after: bytes = b"\n\n"
    end: bytes = b""
    """The text after the last object."""
    named: bool = False
    """True if each object's ``type`` is the name of its event."""


EVENTS = StreamForm(end=b"data: [DONE]\n\n")
NAMED_EVENTS = StreamForm(named=True)
# One object per line. The first object has no content, and may be sent repeatedly.
LINES = StreamForm("application/x-ndjson", before=b"", after=b"\n")


Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """The id, time and model that all objects of one response repeat."""

    id: str
    created: int
    """Creation time in seconds since 1970."""
    model: str

    def object(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def extend(whole: Json, part: Json) -> None:
    """Add a part of a streamed object to the whole: join texts and lists, and merge objects."""
    for name, value in part.items():
        known = whole.get(name)
        if known is None:
            whole[name] = [*value] if isinstance(value, list | tuple) else value
        elif isinstance(value, dict):
            extend(known, value)
        elif isinstance(value, str):
            whole[name] = known + value
        elif isinstance(value, list | tuple):
            known += value


def token_objects(tokens: Iterable[TokenReport], token_bytes: TokenText) -> list[Json]:
    """Return tokens as JSON: text, bytes, log-probabilities, and the likeliest alternatives."""

    def entry(token_id: int, logprob: float) -> Json:
        raw = token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    return [
        entry(report.token_id, report.logprobs.logprob)
        | {"top_logprobs": [entry(token, value) for token, value in report.logprobs.top]}
        for report in tokens
    ]


def usage_object(usage: Usage, cache_report: bool) -> Json:
    """Return token counts as JSON. ``cache_report`` adds the first cache miss with its reason, the
    time to the first token, and the number of tokens per second."""
    details: Json = {"cached_tokens": usage.prefix.cached_tokens if usage.prefix else 0}
    timings: Json = {}
    generated: Json = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.drafts is not None:
        generated["accepted_prediction_tokens"] = usage.drafts.accepted
        generated["rejected_prediction_tokens"] = usage.drafts.rejected
    if cache_report:
        details["cache_miss"] = cache_miss(usage.prefix)
        figures = {"first_token_s": usage.first_token_s, "tokens_per_s": usage.tokens_per_s}
        timings = {"timings": figures}
    return timings | {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": generated,
    }


def written_tokens(usage: Usage) -> int:
    """Return the number of prompt tokens that the request added to the prefix cache."""
    cached = usage.prefix.cached_tokens if usage.prefix else usage.kept_tokens
    return max(0, usage.kept_tokens - cached)


def cache_miss(prefix: PrefixReport | None) -> Json | None:
    """Return the position and the reason of the first cache miss, or None if there was no miss."""
    if prefix is None or prefix.miss is None:
        return None
    miss = prefix.miss
    return {"left_at": prefix.left_at, "reason": miss.value, "message": miss.message}


def usage_chunks(
    metadata: ResponseMetadata, kind: str, usage: Usage, response_options: ResponseOptions
) -> list[Json]:
    if not response_options.include_usage:
        return []
    return [
        metadata.object(kind, []) | {"usage": usage_object(usage, response_options.cache_report)}
    ]


class Answer(Protocol):
    """An answer in an endpoint's format. Deltas (newly generated parts) are added to the answer."""

    stream_form: ClassVar[StreamForm]

    def first_chunks(self) -> list[Json]:
        """Return the chunks (JSON objects of a stream) to send before the model generates."""

    def chunks(self, delta: Delta) -> list[Json]:
        """Return the chunks to send for a delta."""

    def last_chunks(self, usage: Usage) -> list[Json]:
        """Return the chunks to send after the last delta."""

    def failure(self, error: ApiError) -> Json:
        """Return the chunk that replaces the rest of the stream when the engine fails."""

    def add(self, delta: Delta) -> None:
        """Add a delta to the answer that ``whole`` returns."""

    def whole(self, usage: Usage) -> Json:
        """Return the whole answer as one object."""


@dataclass(slots=True)
class GatheredCall:
    """A tool call whose arguments are still arriving."""

    start: ToolCallStart
    arguments: str = ""

    @property
    def input(self) -> Json | None:
        return json_object(self.arguments)

    @property
    def text(self) -> str:
        """The call as text of the answer, to be used if the arguments are no JSON object."""
        name = json.dumps(self.start.name, ensure_ascii=False)
        return f'{CALL_OPEN}\n{{"name": {name}, "arguments": {self.arguments}'
