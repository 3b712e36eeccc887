"""Read the rest of a body that is answered before it has been read."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# A client that sends more than this although it has its answer is not waited for.
MAX_UNREAD_BYTES = 64 * 1024**2


class UnreadBody:
    """Read and discard what is left of a body before its answer ends.

    Most clients send all of it before they look for an answer. A connection that is closed before
    is reset by the system, and the answer is lost with it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass all requests on. How long a request may take to arrive is the connection's
        business."""
        if scope["type"] != "http" or not _brings_a_body(scope):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def watched() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body")
            return message

        async def held(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                unread = 0
                while not is_read and unread < MAX_UNREAD_BYTES:
                    unread += len((await watched()).get("body", b""))
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._app(scope, watched, held)


def _brings_a_body(scope: Scope) -> bool:
    """Return whether a body is on its way: a client that asks first whether to send it sends none
    to a refusal."""
    headers = Headers(scope=scope)
    is_long = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return is_long and "expect" not in headers
