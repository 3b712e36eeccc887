"""Accept paths with a slash at the end."""

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlash:
    """Remove the slash at the end of a path, as most servers do in one way or another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass all requests on, without the slash at the end of their paths. What stands around
        this one sees the path as it came."""
        path = scope.get("path", "")
        if scope["type"] == "http" and len(path) > 1 and path.endswith("/"):
            scope["path"] = path.rstrip("/") or "/"
        await self._app(scope, receive, send)
