"""How a route answers: as a stream, or whole while it watches whether the client is still there."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import EngineDeadError, QueueFullError
from engine.serving import ServingEngine
from server.chat.admission import Admission
from server.chat.choices import Choices
from server.chat.generation import GenerationError, Prompt
from server.config import Config
from server.metrics.answer_times import RequestTimes
from server.protocol.answers import Answer
from server.protocol.wire_errors import generation_failed
from server.routes.answer_stream import AnswerStream
from server.routes.json_response import json_pieces, json_response
from server.text.tokenizer import Tokenizer

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class Answering:
    """Has the engine answer prompts, and makes the responses."""

    client: ServingEngine
    tokenizer: Tokenizer
    admission: Admission
    config: Config
    clock: Callable[[], float]
    """Seconds; measures the time of a request."""

    async def respond(
        self, request: Request, answer: Answer, *prompts: Prompt, stream: bool | None
    ) -> Response:
        """Start the answers to the prompts, and the one response for them. Raises ApiError."""
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
        if whole is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return await json_response(json_pieces(whole))

    def start(self, *prompts: Prompt, times: RequestTimes | None = None) -> Choices:
        """Submit prompts to the engine that PromptRules has accepted. times: of their request.
        Raises ApiError: 429 or 503."""
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
            raise self.admission.refused(error) from error
        except EngineDeadError as error:
            raise self.admission.no_engine() from error


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
