"""Refuse requests while the server drains, and track those that may still end."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.chat.drain import Drain
from server.http.errors import answer_with
from server.metrics.requests import CountRefusal, Refusal
from server.protocol.wire_errors import shutting_down

# Probes are answered until the end.
STAYS_OPEN = frozenset({"/health", "/ready", "/metrics"})


class DrainGuard:
    """Answer 503 with Retry-After while the server drains, and track all other requests until they
    are answered. One that is cut off before its answer began gets a 503, too."""

    def __init__(self, app: ASGIApp, drain: Drain, count_refusal: CountRefusal) -> None:
        self._app = app
        self._drain = drain
        self._count_refusal = count_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in STAYS_OPEN:
            await self._app(scope, receive, send)
            return
        if self._drain.draining:
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
        self._drain.enter(task)
        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not self._drain.has_cut:
                raise
            if not has_begun:
                await answer_with(shutting_down(), scope, receive, send)
        finally:
            self._drain.leave(task)
