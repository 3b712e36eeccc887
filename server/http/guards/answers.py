"""Answers 503 while the server shuts down, and 500 after a bug in a route."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.chat.drain import Drain
from server.http.errors import answer_with
from server.metrics.requests import CountRefusal, Refusal
from server.protocol.wire_errors import internal_error, shutting_down

# Monitoring programs get answers at these paths even while the server shuts down.
STAYS_OPEN = frozenset({"/health", "/ready", "/metrics"})


class AnswerGuard:
    """Tracks running requests. While the server drains (waits for running answers at its end), new
    requests get 503. After the wait, requests whose answers have not begun get 503, too. If a route
    fails, the client gets 500 or a broken connection, and the observer logs the exception."""

    def __init__(self, app: ASGIApp, drain: Drain, count_refusal: CountRefusal) -> None:
        self._app = app
        self._drain = drain
        self._count_refusal = count_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drains = scope["path"] not in STAYS_OPEN
        if drains and self._drain.draining:
            self._count_refusal(Refusal.DRAINING)
            await answer_with(shutting_down(), scope, receive, send)
            return
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        if drains:
            self._drain.enter(task)
        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not (drains and self._drain.has_cut):
                raise
            if not has_begun:
                await answer_with(shutting_down(), scope, receive, send)
        except Exception:
            if not has_begun:
                await answer_with(internal_error(), scope, receive, send)
            raise
        finally:
            if drains:
                self._drain.leave(task)
