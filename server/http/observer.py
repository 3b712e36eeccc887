"""Observes all requests: gives each request an id, counts it, and logs it."""

import traceback
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import REQUEST_ID_HEADER, SAFE_HEADERS, adding
from server.metrics import HttpMetrics
from server.metrics.answer_times import RecentRequests, RequestTimes
from server.protocol.common import HEADER, bind_request_id
from server.protocol.unsupported import Unsupported
from server.routes.openapi import speaks_anthropic

NOT_SHOWN_HEADER, LEFT_OUT_HEADER = b"X-Images-Not-Shown", b"X-History-Left-Out"
NOT_ENFORCED_HEADER = b"X-Quire-Not-Enforced"
UNKNOWN_ROUTE = "none"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Clients poll these routes every few seconds. Their requests are logged at level debug.
QUIET_ROUTES = frozenset(
    {
        *("/health", "/ready", "/metrics", "/memory", "/version", "/cluster/replicas"),
        *("/", "/page/{name:path}", "/api/hello", "/api/ps"),
    }
)


@dataclass(frozen=True, slots=True)
class RequestObserver:
    """Counts and logs every request, as the outermost ASGI application. The log has an exception's
    types and source lines. It has no message: a message may repeat a client's text."""

    app: ASGIApp
    metrics: HttpMetrics
    recent: RecentRequests
    logs_requests: bool
    model: str | None = None
    """The name of the model, or None if there are several models."""
    log: Any = field(init=False, default_factory=lambda: structlog.get_logger("quire.requests"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Count the response when it begins, because then the route is known."""
        if scope["type"] != "http":
            # The server's start and end are not requests, so they bypass the guards.
            await scope["app"].router(scope, receive, send)
            return
        safe_send = adding(SAFE_HEADERS, send)
        exchange = Exchange(scope, receive, safe_send, self.metrics, self.model)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except Exception as error:
            exchange.failed_at = places_of(error)
        finally:
            self._end(exchange)

    def _end(self, exchange: "Exchange") -> None:
        if exchange.forwarded and (exchange.left or not exchange.failed):
            return
        exchange.count()
        seconds = exchange.times.clock() - exchange.times.arrived
        self.metrics.request_ended(exchange.endpoint, seconds)
        self.recent.add(exchange.times)
        if exchange.failed_at:
            # If the client has left, the exception only says that the connection broke.
            write = self.log.debug if exchange.left else self.log.error
            write("request failed", endpoint=exchange.endpoint, at=exchange.failed_at)
        if self.logs_requests:
            quiet = exchange.endpoint in QUIET_ROUTES
            write = self.log.debug if quiet else self.log.info
            write("request", **exchange.line(seconds))


class Exchange:
    """One request and its response in progress."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, metrics: HttpMetrics, model: str | None
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._metrics = metrics
        name = bind_request_id(scope["headers"])
        request_id = name.encode()
        self._headers = [(HEADER.encode(), request_id)]
        if speaks_anthropic(scope):
            self._headers.append((REQUEST_ID_HEADER.encode(), request_id))
        self.times: RequestTimes = metrics.request_arrived()
        self.times.id = name
        # Routes read these values from request.state.
        scope.setdefault("state", {}).update(times=self.times, model=model)
        self.left = False
        """True if the client left before the end of its answer."""
        self.failed_at: list[str] = []
        """Types of exceptions, and the source lines that raised them."""
        self._complete = False
        self._status: int | None = None
        self._counted = False

    @property
    def endpoint(self) -> str:
        """The path pattern of the route. It contains no text from the client."""
        path = getattr(self._scope.get("route"), "path", UNKNOWN_ROUTE)
        assert isinstance(path, str)
        return path

    @property
    def forwarded(self) -> bool | None:
        """None if this process answers. If a model's own process answers and counts the request,
        the value is False until the answer begins, and True after that."""
        forwarded: bool | None = self._scope["state"].get("forwarded")
        return forwarded

    @property
    def failed(self) -> bool:
        """True if the request has failed with an error of this server."""
        return bool(self.failed_at) or "error" in self._scope["state"]

    def count(self) -> None:
        """Count the response if it has begun and has not been counted yet."""
        if self._status is not None and not self._counted:
            self._counted = True
            self._metrics.count_request(self.endpoint, self._status)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._complete:
            self.left = True
        return message

    async def send(self, message: Message) -> None:
        """Send a message to the client, with the headers that every response has."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            content = self._unsupported
            kinds = ", ".join(f"{kind}={count}" for kind, count in sorted(content.left_out.items()))
            own = [*self._headers, (NOT_SHOWN_HEADER, str(content.count or "").encode())]
            own += [(LEFT_OUT_HEADER, kinds.encode()), (NOT_ENFORCED_HEADER, self._not_enforced)]
            own = [field for field in own if field[1]]
            message["headers"] = [*message.get("headers", ()), *own]
            if self.forwarded is None:
                self.count()
        elif not message.get("more_body"):
            self._complete = True
        try:
            await self._send(message)
        except OSError:
            self.left = True
            raise

    def line(self, seconds: float) -> dict[str, object]:
        """Return the request's fields for the log, none of which contains a client's text."""
        method, times, state = self._scope["method"], self.times, self._scope["state"]
        fields: dict[str, object] = {
            "method": method if method in METHODS else "other",
            "endpoint": self.endpoint,
            "status": self._status,
            "duration_s": round(seconds, 4),
        }
        fields |= {name: state[name] for name in ("model", "error") if state.get(name)}
        if times.answers:
            figures = times.figures(seconds)
            for name, digits in (("first_token_s", 4), ("tokens_per_s", 1)):
                figures[name] = None if figures[name] is None else round(figures[name], digits)
            fields |= figures
        content = self._unsupported
        counts = {"images_not_shown": content.count, "history_left_out": content.left_out.total()}
        fields |= {name: count for name, count in counts.items() if count}
        return fields | {"client_left": self.left}

    @property
    def _not_enforced(self) -> bytes:
        return ", ".join(self._scope["state"].get("not_enforced", ())).encode()

    @property
    def _unsupported(self) -> Unsupported:
        """The request's parts that the model cannot read, such as images."""
        content: Unsupported = self._scope["state"].get("unsupported") or Unsupported("refuse", "")
        return content


def places_of(error: BaseException) -> list[str]:
    """Return types and source lines of an exception and its causes, but no messages."""
    places: list[str] = []
    seen: list[BaseException] = []  # an exception may be both a cause and in a group
    errors: list[BaseException | None] = [error]
    while errors:
        cause = errors.pop(0)
        if cause is None or any(cause is other for other in seen):
            continue
        seen.append(cause)
        places.append(type(cause).__qualname__)
        places += (
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(cause.__traceback__)
        )
        inner = cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
        errors += [*inner, cause.__cause__ or cause.__context__]
    return places
