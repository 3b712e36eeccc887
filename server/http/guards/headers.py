"""Headers that tell browsers what not to do with an answer."""

from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def adding(headers: Mapping[str, str], send: Send) -> Send:
    """Return a ``send`` that adds headers which an answer does not have by itself."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message.setdefault("headers", [])
            own = MutableHeaders(scope=message)
            for name, value in headers.items():
                own.setdefault(name, value)
            message["headers"] = own.raw
        await send(message)

    return sent


class SafeHeaders:
    """Add the headers to every answer; an answer's own win."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass all requests on, and add the headers to their answers."""
        if scope["type"] == "http":
            send = adding(SAFE_HEADERS, send)
        await self._app(scope, receive, send)
