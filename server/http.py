"""The application behind its socket: uvicorn, with our limits around it."""

import socket

import structlog
import uvicorn

from server.app import create_app
from server.config import Config
from server.guards.connections import guarded_protocol
from server.guards.descriptors import connections_that_fit
from server.service import Service

# What is left to close when everything has been answered: connections whose client does not read.
CLOSE_TIMEOUT_S = 1
# A thousand clients may come at once; the system may keep fewer waiting.
LISTEN_BACKLOG = 2048
# asyncio takes as many before it does anything else, and tries as often where there is no
# descriptor left.
ACCEPTS_AT_ONCE = 16

log = structlog.get_logger("quire")


def http_config(settings: Config, service: Service) -> uvicorn.Config:
    """Return how the service is served by uvicorn. Raises this process's limit of open files."""
    limits = settings.limits
    most = connections_that_fit(limits.max_connections)
    if most < limits.max_connections:
        log.warning(
            f"limits.max_connections is {limits.max_connections}, but the system allows open files "
            f"for {most} only: raise `ulimit -n`, or lower the setting"
        )
        limits = limits.model_copy(update={"max_connections": most})
    return uvicorn.Config(
        create_app(service),
        host=settings.server.host,
        port=settings.server.port,
        http=guarded_protocol(limits, service.metrics),
        h11_max_incomplete_event_size=limits.max_header_bytes,
        ws="none",
        backlog=ACCEPTS_AT_ONCE,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        server_header=False,
        proxy_headers=False,
        access_log=False,
        log_config=None,
        # What it warns of, every client can bring about as often as it likes.
        log_level="error",
    )


class GuardedServer(uvicorn.Server):
    """Lets many wait to be accepted, and accepts few at a time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with our backlog: asyncio uses one number for the backlog and for what it accepts
        at once."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)
