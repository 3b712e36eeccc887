"""Forwards requests to a model's process and streams the answers back.

While a model is being loaded, its streamed answers begin with comments, which clients ignore."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.chat.salts import request_key
from server.http.errors import SAFE_HEADERS, error_response, note_error
from server.protocol.answers import LINES, NAMED_EVENTS
from server.protocol.chat.answer import ChatAnswer
from server.protocol.common import HEADER, current_request_id
from server.protocol.messages.answer import MessageAnswer
from server.protocol.ollama.answer import OllamaAnswer
from server.protocol.responses.answer import error_event
from server.protocol.wire_errors import ApiError
from server.routes.answering import (
    SIGN_OF_LIFE,
    STREAM_HEADERS,
    sign_of_life,
    unless_left,
    write_chunk,
)
from server.routes.ollama import KINDS, empty_answer
from server.routes.openapi import OLLAMA_PATHS, speaks_anthropic, speaks_ollama
from server.supervisor.front import FAILURES, Front, failure_of
from server.supervisor.models import ManagedModel
from server.supervisor.process import Headers, ModelProcess, NoAnswerError

# Headers for a single connection (RFC 9110, section 7.6.1), which are not forwarded.
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
class StreamStart:
    """The beginning of a streamed answer while its model is being loaded."""

    media_type: str
    sign_of_life: bytes
    begins_at_once: bool = False
    """If False, begin after ``server.sse_ping_s``: until then, an error can set the HTTP status."""


def stream_start(path: str, model: str, stream: object) -> StreamStart | None:
    """Return how the answer's stream begins, or None if the answer is not streamed. ``stream`` is
    the field of the request's body."""
    if (kind := KINDS.get(path)) is not None:
        # The first line has an empty text, since clients parse every line as JSON.
        line = sign_of_life(empty_answer(kind, model))
        start = StreamStart(LINES.media_type, line, begins_at_once=True)
        return None if stream is False else start
    events = StreamStart("text/event-stream; charset=utf-8", SIGN_OF_LIFE)
    return events if stream is True and not path.startswith(OLLAMA_PATHS) else None


@dataclass(eq=False)
class ForwardedAnswer(Response):
    """The answer of a model's process to a client."""

    front: Front
    request: Request
    model: ManagedModel
    content: bytes = b""
    stream: StreamStart | None = None
    keep_alive_s: float | None = None
    """As for ``ModelSupervisor.use``."""
    background: None = None
    _begun: bool = False
    _num_events: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. If the client disconnects, cancel the request to the process."""
        with suppress(ClientDisconnect):
            await unless_left(self.request, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        model, client = self.model, client_of(self.request)
        try:
            async with self.front.models.use(model, client, self.keep_alive_s):
                scope["state"]["forwarded"] = False
                while not await self._relay(await self._process(send), send):
                    pass
            return
        except tuple(FAILURES) as error:
            failure = failure_of(model.name, error)
        note_error(scope["state"], failure)
        if not self._begun:
            await error_response(scope, failure)(scope, receive, send)
        elif self.stream is not None:
            await self._end_with(failure, send)
        else:
            raise failure  # breaks the connection, so that the client notices the failure

    async def _process(self, send: Send) -> ModelProcess:
        """Load the model if needed, and return its process. While the model is being loaded, begin
        the answer's stream. Raises LoadError, NoRoomError, TimeoutError."""
        models, config, stream = self.front.models, self.front.config, self.stream
        if (process := models.running(self.model)) is not None:
            return process
        loading = asyncio.create_task(models.process_of(self.model))
        ping_s = config.server.sse_ping_s
        wait_s = None if stream is None else 0.0 if stream.begins_at_once else ping_s
        try:
            async with asyncio.timeout(config.models.load_timeout_s):
                while not (await asyncio.wait((loading,), timeout=wait_s))[0]:
                    assert stream is not None
                    head = [(b"content-type", stream.media_type.encode()), *STREAM_HEAD]
                    await self._begin(200, head, send)
                    await send(_body(stream.sign_of_life))
                    wait_s = ping_s
                return loading.result()
        finally:
            loading.cancel()

    async def _relay(self, process: ModelProcess, send: Send) -> bool:
        """Send the process's answer, and return True. Return False if the process ended before it
        got the request. Raises NoAnswerError if the process ends during the answer."""
        request = self.request
        target, headers = target_of(request.scope), sent_headers(request)
        upstream = process.stream(request.method, target, headers, self.content)
        try:
            async with upstream as answer:
                request.state.forwarded = True
                if self._begun and answer.status != 200:
                    body = b"".join([chunk async for chunk in answer.aiter_stream()])
                    await self._end_with(_error_of(answer.status, body), send)
                    return True
                await self._begin(answer.status, _returned(answer.headers), send)
                async for chunk in answer.aiter_stream():
                    self._num_events += chunk.count(b"data: ")
                    await send(_body(chunk))
        except NoAnswerError as error:
            if error.unasked:
                return False
            raise
        except asyncio.CancelledError:
            request.state.forwarded = True  # the process counts this request in its metrics
            raise
        await send(_body(b"", is_last=True))
        return True

    async def _begin(self, status: int, headers: Headers, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _end_with(self, error: ApiError, send: Send) -> None:
        """Send an error event of the client's API as the end of a stream that has begun."""
        last = _failure_event(self.request.scope, error, self._num_events)
        await send(_body(last, is_last=True))


def _body(chunk: bytes, *, is_last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": not is_last}


def client_of(request: Request) -> bytes:
    """Return a digest of a client's key and address, which stands for the client."""
    host = request.client.host if request.client else ""
    return sha256(f"{request_key(request.headers)}\n{host}".encode()).digest()


def target_of(scope: Scope) -> bytes:
    """Return a request's path and query, percent-encoded as the client sent them."""
    query = scope["query_string"]
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path + (b"?" + query if query else b"")


def sent_headers(request: Request) -> Headers:
    own = [(HEADER.encode(), current_request_id().encode())]
    raw = request.headers.raw
    return [field for field in raw if field[0].decode("latin-1") not in NOT_SENT] + own


def _returned(headers: Headers) -> Headers:
    lower = [(name.lower(), value) for name, value in headers]
    return [field for field in lower if field[0].decode("latin-1") not in NOT_RETURNED]


def _error_of(status: int, body: bytes) -> ApiError:
    """Return the error that is described by the body of a process's error response."""
    error = from_json(body)["error"]
    fields = error if isinstance(error, dict) else {"message": error}
    kind = fields.get("type") or "server_error"
    return ApiError(
        status, fields["message"], type=kind, param=fields.get("param"), code=fields.get("code")
    )


def _failure_event(scope: Scope, error: ApiError, number: int) -> bytes:
    """Return the error event that ends a stream after ``number`` other events."""
    if scope["path"].startswith(RESPONSES_PATH):
        return write_chunk(NAMED_EVENTS, error_event(error, number))
    answer: type[ChatAnswer | MessageAnswer | OllamaAnswer] = ChatAnswer
    if speaks_anthropic(scope):
        answer = MessageAnswer
    elif speaks_ollama(scope):
        answer = OllamaAnswer
    return write_chunk(answer.stream_form, answer.failure(error))
