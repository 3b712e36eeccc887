"""How a route answers: as a stream, or whole while it watches whether the client is still there."""

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from server.choices import Choices
from server.generation import GenerationError, Prompt
from server.protocol.answers import Answer
from server.protocol.errors import internal_error
from server.service import Service
from server.sse import AnswerStream

CLIENT_CLOSED_REQUEST = 499


async def respond(
    request: Request, service: Service, prompt: Prompt, answer: Answer, *, stream: bool
) -> Response:
    """Starts the answer to a prompt, and the response for it."""
    return await respond_to_all(request, service, (prompt,), answer, stream=stream)


async def respond_to_all(
    request: Request,
    service: Service,
    prompts: Sequence[Prompt],
    answer: Answer,
    *,
    stream: bool,
) -> Response:
    """Starts the answers to several prompts, and the one response for them."""
    choices = service.start(*prompts)
    ping_s = service.config.server.sse_ping_s
    if stream:
        return AnswerStream(choices, answer, ping_s)
    gathering = asyncio.create_task(_gather(choices, answer, ping_s))
    leaving = asyncio.create_task(client_left(request))
    try:
        await asyncio.wait((gathering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(gathering.result())
    except GenerationError as error:
        raise internal_error(f"Generation failed: {error}.") from error
    finally:
        for task in (gathering, leaving):
            task.cancel()
        choices.close()


async def _gather(choices: Choices, answer: Answer, ping_s: float) -> dict[str, Any]:
    async for deltas in choices.steps(ping_s):
        for delta in deltas:
            answer.add(delta)
    return answer.whole(choices.usage)


async def client_left(request: Request) -> None:
    """Returns when the client has closed its connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
