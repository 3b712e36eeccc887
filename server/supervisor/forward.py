"""Forwards a request to a model's process, and its answer back as it comes.

A stream whose model is being loaded begins before there is an answer: what clients ignore tells
them that somebody is there.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.http.errors import SAFE_HEADERS, error_response, note_error
from server.protocol.common import HEADER, current_request_id
from server.protocol.messages.answer import late_message_error
from server.protocol.ollama.answer import ollama_error
from server.protocol.wire_errors import ApiError
from server.routes.answering import SIGN_OF_LIFE, STREAM_HEADERS, event, unless_left
from server.routes.openapi import speaks_anthropic, speaks_ollama
from server.supervisor.errors import (
    LoadError,
    NoAnswerError,
    NoRoomError,
    model_ended,
    no_room,
    not_loaded,
    still_loading,
)
from server.supervisor.models import ManagedModel, ModelSupervisor
from server.supervisor.process import Headers, ModelProcess

# RFC 9110, section 7.6.1: fields of one connection. The others are the front's own.
OF_ONE_CONNECTION = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
    *("upgrade", "expect"),
}
NOT_SENT = OF_ONE_CONNECTION | {"content-length", HEADER}
NOT_RETURNED = OF_ONE_CONNECTION | {"date", HEADER, "request-id"}
NOT_RETURNED |= {name.lower() for name in SAFE_HEADERS} - {"cache-control"}
STREAM_HEAD = [(name.lower().encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
RESPONSES_PATH = "/v1/responses"


@dataclass(frozen=True, slots=True)
class Forwarding:
    """What all forwarded requests have in common."""

    models: ModelSupervisor
    load_timeout_s: float
    """How long a request waits for its model."""
    ping_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a stream has before its answer."""

    media_type: bytes
    sign_of_life: bytes
    begins_at_once: bool
    """Else errors have a status of their own as long as clients have patience."""


EVENTS = Waiting(b"text/event-stream; charset=utf-8", SIGN_OF_LIFE, begins_at_once=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is forwarded."""

    model: ManagedModel
    client: bytes
    """Who asks."""
    body: bytes
    waiting: Waiting | None = None
    """Of one that asks for a stream."""
    keep_alive_s: float | None = None
    """How long the client wants the model to stay; negative: for ever."""


class ForwardedAnswer(Response):
    """The answer of a model's process."""

    def __init__(self, request: Request, asked: Asked, how: Forwarding) -> None:
        self.background = None
        self._request = request
        self._asked = asked
        self._how = how
        self._begun = False
        self._num_events = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. A client that leaves ends its request."""
        await unless_left(self._request, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked, how = self._asked, self._how
        try:
            async with how.models.use(asked.model, asked.client, asked.keep_alive_s):
                scope["state"]["forwarded"] = False
                while not await self._relay(await self._process(send), send):
                    pass
            return
        except LoadError as error:
            failure = not_loaded(asked.model.name, error)
        except NoRoomError as error:
            failure = no_room(asked.model.name, error)
        except TimeoutError:
            failure = still_loading(asked.model.name)
        except NoAnswerError:
            failure = model_ended(asked.model.name)
        note_error(scope["state"], failure)
        if not self._begun:
            await error_response(scope, failure)(scope, receive, send)
        elif asked.waiting is not None:
            await self._end_with(failure, send)
        else:
            raise failure  # the connection is broken off, so that the client can tell

    async def _process(self, send: Send) -> ModelProcess:
        """Return the model's process. Raises LoadError, NoRoomError, TimeoutError."""
        models, model = self._how.models, self._asked.model
        if (process := models.running(model)) is not None:
            return process
        loading = asyncio.create_task(models.process_of(model))
        waiting = self._asked.waiting
        wait_s = None if waiting is None else 0.0 if waiting.begins_at_once else self._how.ping_s
        try:
            async with asyncio.timeout(self._how.load_timeout_s):
                while not (await asyncio.wait((loading,), timeout=wait_s))[0]:
                    assert waiting is not None
                    head = [(b"content-type", waiting.media_type), *STREAM_HEAD]
                    await self._begin(200, head, send)
                    await send(_more(waiting.sign_of_life))
                    wait_s = self._how.ping_s
                return loading.result()
        finally:
            loading.cancel()

    async def _relay(self, process: ModelProcess, send: Send) -> bool:
        """Send what the process answers. False where it had ended before it was asked. Raises
        NoAnswerError where it ends meanwhile."""
        request = self._request
        target, headers = target_of(request.scope), sent_headers(request)
        upstream = process.stream(request.method, target, headers, self._asked.body)
        try:
            async with upstream as answer:
                request.state.forwarded = True
                if self._begun and answer.status != 200:
                    failed = from_json(b"".join([chunk async for chunk in answer.aiter_stream()]))
                    await self._end_with(_error_of(answer.status, failed), send)
                    return True
                await self._begin(answer.status, _returned(answer.headers), send)
                async for chunk in answer.aiter_stream():
                    self._num_events += chunk.count(b"data: ")
                    await send(_more(chunk))
        except NoAnswerError as error:
            if error.unasked:
                return False
            raise
        except asyncio.CancelledError:
            request.state.forwarded = True  # its process sees that the client has left
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _begin(self, status: int, headers: Headers, send: Send) -> None:
        if self._begun:
            return
        self._begun = True
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _end_with(self, error: ApiError, send: Send) -> None:
        """End a stream that has begun with the error, in the shape of its API."""
        last = _failure_event(self._request.scope, error, self._num_events)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _more(chunk: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


def target_of(scope: Scope) -> bytes:
    """Return path and query as they were sent."""
    query = scope["query_string"]
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path + (b"?" + query if query else b"")


def sent_headers(request: Request) -> Headers:
    """Return the fields of a request as a model's process gets them."""
    own = [(HEADER.encode(), current_request_id().encode())]
    return [its for its in request.headers.raw if its[0].decode("latin-1") not in NOT_SENT] + own


def _returned(headers: Headers) -> Headers:
    lower = [(name.lower(), value) for name, value in headers]
    return [its for its in lower if its[0].decode("latin-1") not in NOT_RETURNED]


def _error_of(status: int, body: Mapping[str, Any]) -> ApiError:
    """Return the error that a process answered, which comes too late to be a status."""
    error = body["error"]
    found = error if isinstance(error, dict) else {"message": error}
    kind = found.get("type") or "server_error"
    return ApiError(
        status, found["message"], type=kind, param=found.get("param"), code=found.get("code")
    )


def _failure_event(scope: Scope, error: ApiError, number: int) -> bytes:
    """Return the event that ends a stream. number: of the events before it."""
    if speaks_anthropic(scope):
        return event(late_message_error(error, current_request_id()), named=True)
    if speaks_ollama(scope):
        return to_json(ollama_error(error) | error.late_fields) + b"\n"
    if scope["path"].startswith(RESPONSES_PATH):
        said = {"code": error.code, "message": error.message, "param": error.param}
        ended = {"type": "error", **said, **error.late_fields, "sequence_number": number}
        return event(ended, named=True)
    return event(error.late_body())
