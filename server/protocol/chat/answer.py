"""Convert deltas, the generated parts of an answer, to objects of /v1/chat/completions."""

from dataclasses import dataclass, field
from typing import ClassVar

from server.protocol.answers import (
    EVENTS,
    Json,
    ResponseMetadata,
    StreamForm,
    TokenText,
    token_objects,
    usage_chunks,
    usage_object,
)
from server.protocol.common import ResponseOptions
from server.protocol.wire_errors import ApiError
from server.text.conversation import Channel
from server.text.pieces import AnswerPiece, Delta, TextPiece, TokenReport, ToolCallStart, Usage


@dataclass(slots=True)
class _ChatChoice:
    """The received parts of a choice, which is one of several answers to a prompt."""

    content: str = ""
    reasoning: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    finish: str | None = None
    token_ids: list[int] = field(default_factory=list)

    def add(self, piece: AnswerPiece) -> None:
        if isinstance(piece, ToolCallStart):
            function = {"name": piece.name, "arguments": ""}
            self.calls.append({"id": piece.id, "type": "function", "function": function})
        elif not isinstance(piece, TextPiece):
            self.calls[piece.index]["function"]["arguments"] += piece.text
        elif piece.channel is Channel.REASONING:
            self.reasoning += piece.text
        else:
            self.content += piece.text

    def object(self, index: int) -> Json:
        content = self.content if self.content or not self.calls else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": self.logprobs, "refusal": None} if self.logprobs else None,
            "finish_reason": self.finish,
        }


@dataclass(slots=True)
class ChatAnswer:
    """One chat completion, streamed or whole."""

    stream_form: ClassVar[StreamForm] = EVENTS

    metadata: ResponseMetadata
    token_bytes: TokenText
    response_options: ResponseOptions
    prompt_ids: tuple[int, ...] | None = None
    """The prompt's token ids, if the response must contain token ids."""
    _choices: list[_ChatChoice] = field(init=False)

    def __post_init__(self) -> None:
        self._choices = [_ChatChoice() for _ in range(self.response_options.choices)]

    def first_chunks(self) -> list[Json]:
        return [
            self._chunk(index, {"role": "assistant", "content": ""}, None, None) | self._prompt
            for index in range(self.response_options.choices)
        ]

    def chunks(self, delta: Delta) -> list[Json]:
        """Return the chunks to stream for a delta. The finish reason has a chunk of its own."""
        chunks: list[Json] = []
        index = delta.index
        logprobs = _chat_logprobs(delta.tokens, self.token_bytes)
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
        choice = self._choices[delta.index]
        for piece in delta.pieces:
            choice.add(piece)
        logprobs = _chat_logprobs(delta.tokens, self.token_bytes)
        choice.logprobs += (logprobs or {}).get("content", [])
        choice.finish = delta.finish or choice.finish
        choice.token_ids += delta.token_ids

    def whole(self, usage: Usage) -> Json:
        choices = [choice.object(index) for index, choice in enumerate(self._choices)]
        for number, choice in enumerate(self._choices if self._prompt else ()):
            choices[number]["token_ids"] = choice.token_ids
        return (
            self.metadata.object("chat.completion", choices)
            | self._prompt
            | {"usage": usage_object(usage, self.response_options.cache_report)}
        )

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


def _chat_logprobs(tokens: list[TokenReport], token_bytes: TokenText) -> Json | None:
    if not tokens:
        return None
    return {"content": token_objects(tokens, token_bytes), "refusal": None}
