"""Answers of both endpoints, and what they are made of."""

from typing import Any

from engine.types import TokenLogprobs
from server.generation import TokenReport, Usage
from server.protocol.answers import Heading
from server.protocol.chat.answer import ChatAnswer
from server.protocol.common import Wanted
from server.protocol.completions.answer import Echo, TextAnswer

HEADING = Heading("id-1", 123, "model-1")
USAGE = Usage(prompt_tokens=10, completion_tokens=5, reasoning_tokens=2)
BYTES = {0: b"a", 1: b"\xc3", 2: b"\xa9", 3: b"bc"}


def report(token: int, logprob: float, *top: tuple[int, float], offset: int = 0) -> TokenReport:
    return TokenReport(token, TokenLogprobs(logprob, top), offset)


def chat_answer(**wanted: Any) -> ChatAnswer:
    return ChatAnswer(HEADING, BYTES.__getitem__, Wanted(**wanted))


def text_answer(prompts: int = 1, echo: Echo | None = None, **wanted: Any) -> TextAnswer:
    return TextAnswer(HEADING, BYTES.__getitem__, Wanted(**wanted), prompts, echo)


def deltas_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks]
