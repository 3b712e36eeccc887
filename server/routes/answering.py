"""How a route answers: as a stream, or whole while it watches whether the client is still there."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from server.chat.choices import Choices
from server.chat.generation import GenerationError, Prompt
from server.chat.service import Service
from server.protocol.answers import Answer
from server.protocol.wire_errors import generation_failed
from server.routes.json_response import json_pieces, json_response
from server.routes.sse import AnswerStream

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499


async def respond(
    request: Request, service: Service, prompt: Prompt, answer: Answer, *, stream: bool
) -> Response:
    """Start the answer to a prompt, and the response for it."""
    return await respond_to_all(request, service, (prompt,), answer, stream=stream)


async def respond_to_all(
    request: Request,
    service: Service,
    prompts: Sequence[Prompt],
    answer: Answer,
    *,
    stream: bool,
) -> Response:
    """Start the answers to several prompts, and the one response for them."""
    choices = service.start(*prompts, times=request.state.times)
    ping_s = service.config.server.sse_ping_s
    if stream:
        return AnswerStream(choices, answer, ping_s)
    try:
        whole = await unless_left(request, _gather(choices, answer, ping_s))
    except GenerationError as error:
        raise generation_failed(str(error), service.config.limits.retry_after_s) from error
    finally:
        choices.close()
    if whole is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return await json_response(json_pieces(whole))


async def _gather(choices: Choices, answer: Answer, ping_s: float) -> dict[str, Any]:
    async for deltas in choices.steps(ping_s):
        for delta in deltas:
            answer.add(delta)
    return answer.whole(choices.usage)


async def unless_left(request: Request, computation: Coroutine[Any, Any, T]) -> T | None:
    """Await a computation and return its result. Where the client closes its connection before,
    cancel it and return None. The request's body must have been read."""
    computing = asyncio.create_task(computation)
    leaving = asyncio.create_task(_client_left(request))
    try:
        await asyncio.wait((computing, leaving), return_when=asyncio.FIRST_COMPLETED)
        return computing.result() if computing.done() else None
    finally:
        for task in (computing, leaving):
            task.cancel()


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
