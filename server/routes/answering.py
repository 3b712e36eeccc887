"""Sends answers as a stream or as one JSON body. Stops work for clients that disconnect."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from engine.serving import ServingEngine
from engine.types import EngineDeadError, QueueFullError
from server.chat.admission import Admission
from server.chat.generation import Choices, Prompt
from server.config import Config
from server.metrics.answer_times import RequestTimes
from server.protocol.answers import LINES, Answer, StreamForm
from server.protocol.wire_errors import generation_failed
from server.text.pipeline import GenerationError
from server.text.tokenizer import Tokenizer

T = TypeVar("T")
SIGN_OF_LIFE = b": waiting\n\n"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# The number of list members to encode at once. CONTAINERS is for lists of lists or objects.
PLAIN_VALUES, CONTAINERS = 4096, 16
PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Answering:
    """Submits prompts to the engine and makes the responses."""

    client: ServingEngine
    tokenizer: Tokenizer
    admission: Admission
    config: Config
    clock: Callable[[], float]
    """Returns the time in seconds, for the time limit of requests."""

    async def respond(
        self, request: Request, answer: Answer, *prompts: Prompt, stream: bool | None
    ) -> Response:
        """Submit the prompts, and return one response with all answers. Raises ApiError."""
        request.state.not_enforced = prompts[0].not_enforced  # several prompts have no form
        choices = self.start(*prompts, times=request.state.times)
        ping_s = self.config.server.sse_ping_s
        if stream:
            return AnswerStream(choices, answer, ping_s)
        try:
            whole = await unless_left(request, _gather(choices, answer, ping_s))
        except GenerationError as error:
            raise generation_failed(str(error)) from error
        finally:
            choices.close()
        return await json_response(json_pieces(whole))

    def start(self, *prompts: Prompt, times: RequestTimes) -> Choices:
        """Submit prompts that PromptRules has accepted. Raises ApiError (429 or 503)."""
        try:
            return Choices(
                self.client,
                self.tokenizer,
                *prompts,
                times=times,
                max_s=self.config.limits.max_request_s,
                clock=self.clock,
            )
        except QueueFullError as error:
            raise self.admission.count_refusal(error) from error
        except EngineDeadError as error:
            raise self.admission.no_engine() from error


async def _gather(choices: Choices, answer: Answer, ping_s: float) -> dict[str, Any]:
    async for deltas in choices.steps(ping_s):
        for delta in deltas:
            answer.add(delta)
    return answer.whole(choices.usage)


async def unless_left(request: Request, computation: Coroutine[Any, Any, T]) -> T:
    """Return a computation's result. If the client leaves, cancel the computation and raise
    ClientDisconnect. The request's body must have been read before the call."""
    computing = asyncio.create_task(computation)
    leaving = asyncio.create_task(_client_left(request))
    try:
        await asyncio.wait((computing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not computing.done():
            raise ClientDisconnect
        return computing.result()
    finally:
        for task in (computing, leaving):
            task.cancel()


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def write_chunk(form: StreamForm, data: dict[str, Any]) -> bytes:
    # Clients end lines as str.splitlines does: at U+0085 and U+2028, too.
    return _before(form, data) + to_json(data, ensure_ascii=form is LINES) + form.after


def _before(form: StreamForm, data: dict[str, Any]) -> bytes:
    return (f"event: {data['type']}\n".encode() if form.named else b"") + form.before


def sign_of_life(answer: Answer) -> bytes:
    """Return the text to send when an answer has had nothing new for a while: a comment, or the
    first chunks again, whose repetition clients ignore."""
    if answer.stream_form is LINES:
        return _write_all(answer, answer.first_chunks())
    return SIGN_OF_LIFE


def _write_all(answer: Answer, chunks: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(write_chunk(answer.stream_form, chunk) for chunk in chunks)


class AnswerStream(StreamingResponse):
    """A streamed answer. Each engine step causes one write, and ``ping_s`` seconds without a write
    cause a sign of life (a comment or an empty chunk). The response's end aborts the request."""

    def __init__(self, choices: Choices, answer: Answer, ping_s: float) -> None:
        super().__init__(
            _write_stream(choices, answer, ping_s),
            media_type=answer.stream_form.media_type,
            headers=STREAM_HEADERS,
        )
        self._choices = choices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._choices.close()


async def _write_stream(choices: Choices, answer: Answer, ping_s: float) -> AsyncIterator[bytes]:
    """Yield the stream in pieces, each to be written at once. If generation fails, an error object
    takes the place of the usual end, so that clients notice the error."""
    form = answer.stream_form
    yield _write_all(answer, answer.first_chunks()) or sign_of_life(answer)
    newest, last = time.monotonic(), b""
    try:
        async for deltas in choices.steps(ping_s):
            objects = _write_all(answer, (c for delta in deltas for c in answer.chunks(delta)))
            if choices.finished:
                last = objects  # Sent in one write with the end of the stream.
                continue
            # A step may make deltas without output, so the time since the last write counts.
            is_silent = not deltas or time.monotonic() - newest >= ping_s
            if out := objects or (sign_of_life(answer) if is_silent else b""):
                yield out
                newest = time.monotonic()
        end = (
            chain((_before(form, chunk),), json_pieces(chunk), (form.after,))
            for chunk in answer.last_chunks(choices.usage)
        )
        async for piece in paced(chain([last], *end, [form.end])):
            yield piece
    except GenerationError as error:
        yield write_chunk(form, answer.failure(generation_failed(str(error))))


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yield the text of ``to_json(value)`` in pieces."""
    if not _is_long(value):
        yield to_json(value)
    elif isinstance(value, dict):
        before = b"{"
        for name, member in value.items():
            yield before + to_json(name) + b":"
            yield from json_pieces(member)
            before = b","
        yield b"}"
    else:
        step = CONTAINERS if isinstance(value[0], dict | list) else PLAIN_VALUES
        before = b"["
        for start in range(0, len(value), step):
            part = value[start : start + step]
            if not any(map(_is_long, part)):
                yield before + to_json(part)[1:-1]
            else:
                for number, member in enumerate(part):
                    yield b"," if number else before
                    yield from json_pieces(member)
            before = b","
        yield b"]"


async def paced(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Join pieces into chunks of about PIECE_BYTES. Other tasks can run between two chunks."""
    gathered: list[bytes] = []
    size = 0
    for piece in pieces:
        gathered.append(piece)
        size += len(piece)
        if size >= PIECE_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
            await asyncio.sleep(0)
    yield b"".join(gathered)


async def json_response(pieces: Iterator[bytes]) -> Response:
    body = b"".join([part async for part in paced(pieces)])
    return Response(body, media_type="application/json")


def _is_long(value: Any) -> bool:
    """Return True if a value contains a list that is too long for one piece."""
    if isinstance(value, dict):
        return any(map(_is_long, value.values()))
    if not isinstance(value, list) or not value:
        return False
    if not isinstance(value[0], dict | list):
        return len(value) > PLAIN_VALUES
    return len(value) > CONTAINERS or any(map(_is_long, value))
