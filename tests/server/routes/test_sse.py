import asyncio
import json
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from server.chat.generation import Choices
from server.protocol.answers import EVENTS, Answer, ResponseMetadata
from server.protocol.chat.answer import ChatAnswer
from server.protocol.common import ResponseOptions
from server.routes.answering import SIGN_OF_LIFE, AnswerStream
from server.text.tokenizer import Tokenizer
from tests.server.harness import events, finish_of, streamed
from tests.server.streams import Batches, PreparedStream, prepared, said

PING_S = 1000.0  # silence is prepared
# From this version on servers refuse a write instead of telling that the client has left.
SCOPE = {"type": "http", "asgi": {"spec_version": "2.4"}}
METADATA = ResponseMetadata("id-1", 1, "model")


async def sent(
    choices: Choices, answer: Answer, leaves_after: int | None = None, ping_s: float = PING_S
) -> list[Message]:
    """What a response writes. leaves_after: messages until the client is gone."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)
        if len(messages) == leaves_after:
            raise OSError("the client has left")

    async def receive() -> Message:
        raise AssertionError("nothing more is asked of the client")

    await AnswerStream(choices, answer, ping_s)(SCOPE, receive, send)
    return messages


def chat_answer(tokenizer: Tokenizer, **fields: Any) -> ChatAnswer:
    return ChatAnswer(METADATA, tokenizer.token_bytes, ResponseOptions(**fields))


def bodies(messages: list[Message]) -> list[bytes]:
    return [message["body"] for message in messages[1:] if message["body"]]


def chat_of(tokenizer: Tokenizer, batches: Batches) -> tuple[Choices, PreparedStream]:
    choices, (stream,) = prepared(tokenizer, batches, chat="assistant\n")
    return choices, stream


async def test_a_step_is_one_write(tokenizer: Tokenizer) -> None:
    batches = [said(tokenizer, "Hello", None), said(tokenizer, " you")]
    choices, stream = chat_of(tokenizer, batches)
    messages = await sent(choices, chat_answer(tokenizer))
    first, *steps = bodies(messages)
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["role"] == "assistant"
    # The finish is an event of its own; the end goes with it.
    assert [step.count(b"data: ") for step in steps] == [1, 3]
    assert steps[-1].endswith(EVENTS.end)
    chunks = events(b"".join(bodies(messages)))
    assert (streamed(chunks), finish_of(chunks)) == ("Hello you", "length")
    assert stream.closed


async def test_steps_of_which_nothing_can_be_sent_are_silence_too(tokenizer: Tokenizer) -> None:
    first, *rest = said(tokenizer, "é")
    choices, _ = chat_of(tokenizer, [[first], rest])
    messages = await sent(choices, chat_answer(tokenizer), ping_s=0.0)
    assert bodies(messages)[1] == SIGN_OF_LIFE
    assert len(bodies(messages)) == 3


@pytest.mark.parametrize("leaves_after", [1, 2, 3])
async def test_a_client_that_refuses_a_write_ends_the_request(
    tokenizer: Tokenizer, leaves_after: int
) -> None:
    batches = [said(tokenizer, "a", None)] * 5
    choices, stream = chat_of(tokenizer, batches)
    with pytest.raises(ClientDisconnect):
        await sent(choices, chat_answer(tokenizer), leaves_after)
    assert stream.closed


async def test_a_cancelled_response_ends_the_request(tokenizer: Tokenizer) -> None:
    choices, stream = chat_of(tokenizer, [said(tokenizer, "a", None)])
    writing = asyncio.Event()

    async def send(_: Message) -> None:
        writing.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        raise AssertionError

    response = AnswerStream(choices, chat_answer(tokenizer), PING_S)
    serving = asyncio.ensure_future(response(SCOPE, receive, send))
    await writing.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert stream.closed
