"""What stands between the socket and the routes."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.failures import failure
from server.protocol.errors import ApiError


class BodyLimit:
    """Refuses bodies that are too large while they arrive, with or without Content-Length."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts what ``receive`` delivers; answers 413 when it is too much."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise BodyTooLargeError
            return message

        try:
            await self._app(scope, counted, send)
        except BodyTooLargeError:
            error = ApiError(
                413,
                f"The body is larger than {self._max_body_bytes} bytes.",
                code="body_too_large",
                headers={"Connection": "close"},
            )
            await failure(scope["path"], error)(scope, receive, send)


class BodyTooLargeError(Exception):
    """Raised where the body is read, caught by the guard around it."""
