"""Convert deltas, the generated parts of an answer, to objects of /v1/chat/completions."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from server.protocol.answers import (
    EVENTS,
    Json,
    ResponseMetadata,
    StreamForm,
    TokenText,
    extend,
    token_objects,
    usage_chunks,
    usage_object,
)
from server.protocol.common import ResponseOptions
from server.protocol.wire_errors import ApiError
from server.text.conversation import Channel
from server.text.pieces import AnswerPiece, Delta, TextPiece, ToolCallStart, Usage


@dataclass(slots=True)
class ChatAnswer:
    """One chat completion, streamed or whole."""

    stream_form: ClassVar[StreamForm] = EVENTS

    metadata: ResponseMetadata
    token_bytes: TokenText
    response_options: ResponseOptions
    prompt_ids: tuple[int, ...] | None = None
    """The prompt's token ids, if the response must contain token ids."""
    _choices: list[Json] = field(init=False)
    """What all chunks of each choice (one of several answers) say together."""

    def __post_init__(self) -> None:
        self._choices = [{"delta": {}, "calls": {}} for _ in range(self.response_options.choices)]

    def first_chunks(self) -> list[Json]:
        return [
            self._chunk(index, {"role": "assistant", "content": ""}, None, None) | self._prompt
            for index in range(self.response_options.choices)
        ]

    def chunks(self, delta: Delta) -> list[Json]:
        """Return the chunks to stream for a delta. The finish reason has a chunk of its own."""
        chunks: list[Json] = []
        index = delta.index
        content = token_objects(delta.tokens, self.token_bytes)
        logprobs = {"content": content, "refusal": None} if delta.tokens else None
        for piece in delta.pieces:
            fields = _chat_fields(piece)
            chunks.append(self._chunk(index, fields, logprobs, None))
            logprobs = None
        if logprobs:
            chunks.append(self._chunk(index, {}, logprobs, None))
        if delta.finish is not None:
            chunks.append(self._chunk(index, {}, None, delta.finish))
        if self.prompt_ids is not None and delta.token_ids:
            chunks = chunks or [self._chunk(index, {}, None, None)]
            chunks[0]["choices"][0]["token_ids"] = delta.token_ids
        return chunks

    def last_chunks(self, usage: Usage) -> list[Json]:
        return usage_chunks(self.metadata, "chat.completion.chunk", usage, self.response_options)

    @staticmethod
    def failure(error: ApiError) -> Json:
        return error.late_body()

    def add(self, delta: Delta) -> None:
        whole = self._choices[delta.index]
        for chunk in self.chunks(delta):
            (choice,) = chunk["choices"]
            for call in choice["delta"].pop("tool_calls", ()):
                extend(whole["calls"].setdefault(call.pop("index"), {}), call)
            extend(whole, choice)

    def whole(self, usage: Usage) -> Json:
        choices = [self._whole_choice(**choice) for choice in self._choices]
        return (
            self.metadata.object("chat.completion", choices)
            | self._prompt
            | {"usage": usage_object(usage, self.response_options.cache_report)}
        )

    def _whole_choice(self, delta: Json, calls: Json, **choice: Any) -> Json:
        content = delta.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **delta}
        if calls:
            message["tool_calls"] = list(calls.values())
        ids: Json = {"token_ids": []} if self._prompt else {}
        return {"message": message, **ids, **choice}

    @property
    def _prompt(self) -> Json:
        return {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids}

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = self.metadata.object("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.response_options.include_usage else chunk


def _chat_fields(piece: AnswerPiece) -> Json:
    """Return a piece as JSON fields. Clients read the reasoning under one of two field names."""
    if isinstance(piece, ToolCallStart):
        function = {"name": piece.name, "arguments": ""}
        call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if not isinstance(piece, TextPiece):
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    if piece.channel is Channel.REASONING:
        return {"reasoning_content": piece.text, "reasoning": piece.text}
    return {"content": piece.text}
