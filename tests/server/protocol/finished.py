"""Answers of both endpoints, and what they are made of."""

from typing import Any

from engine.types import TokenLogprobs
from server.protocol.answers import ResponseMetadata
from server.protocol.chat.answer import ChatAnswer
from server.protocol.common import ResponseOptions
from server.protocol.completions import Echo, TextAnswer
from server.text.pieces import TokenReport, Usage

METADATA = ResponseMetadata("id-1", 123, "model-1")
USAGE = Usage(prompt_tokens=10, completion_tokens=5, reasoning_tokens=2)
BYTES = {0: b"a", 1: b"\xc3", 2: b"\xa9", 3: b"bc"}


def report(token: int, logprob: float, *top: tuple[int, float], offset: int = 0) -> TokenReport:
    return TokenReport(token, TokenLogprobs(logprob, top), offset)


def chat_answer(**options: Any) -> ChatAnswer:
    return ChatAnswer(METADATA, BYTES.__getitem__, ResponseOptions(**options))


def text_answer(prompts: int = 1, echo: Echo | None = None, **options: Any) -> TextAnswer:
    return TextAnswer(METADATA, BYTES.__getitem__, ResponseOptions(**options), prompts, echo)


def deltas_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]
