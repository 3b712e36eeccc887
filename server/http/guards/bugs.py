"""Answer bugs of the server."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.errors import answer_with
from server.protocol.wire_errors import internal_error


class BugGuard:
    """Answers for routes that fail: 500. It stands inside all other guards, so that its answers
    have their headers too; what went wrong is said by whoever stands around all of them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 500 to an exception; break the connection off where an answer has begun, so that
        clients can tell. Raises what the route has raised."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            if not begun and scope["type"] == "http":
                await answer_with(internal_error(), scope, receive, send)
            raise
