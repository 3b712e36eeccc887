"""Runs uvicorn. After a signal, the server finishes running answers before it ends."""

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from engine.machine import raise_descriptor_limit
from server.chat.drain import Drain
from server.config import Config
from server.http.app import create_app
from server.http.guards.connections import MAX_HEADER_BYTES, guarded_protocol
from server.http.listener import listen_on
from server.metrics import HttpMetrics
from server.routes.service import Served, Service

# At the server's end, connections whose client does not read are cut after this many seconds.
CLOSE_TIMEOUT_S = 1
# Seconds between two checks of the engine. If the engine no longer runs, the server ends.
ENGINE_POLL_S = 2.0
# Number of connections that wait until the server accepts them. The system may allow fewer.
LISTEN_BACKLOG = 2048
# Number of connections that asyncio accepts, or tries to accept, at a time.
ACCEPTS_AT_ONCE = 16
# File descriptors reserved for model files and anything else that is not a connection. If the limit
# of open files is low, half of it is reserved, but at least as many as an idle server has open.
OTHER_DESCRIPTORS = 256
FEWEST_OTHER_DESCRIPTORS = 32

log = structlog.get_logger("quire")


def listen(
    settings: Config,
    service: Service,
    listener: socket.socket,
    ready: Callable[[Drain, str], None] | None = None,
    others: Sequence[socket.socket] = (),
) -> None:
    """Serve on ``listener`` and ``others`` until a signal arrives or the engine fails. Once clients
    can connect, call ``ready``, or log the address if ``ready`` is None. Raises SettingError."""

    def announce(url: str) -> None:
        if ready is None:
            log.info(f"serving {service.model.id} on {url}")
        else:
            ready(service.drain, url)

    serve_app(settings, create_app(service), service, listener, announce, others)


def serve_app(
    settings: Config,
    app: FastAPI,
    served: Served,
    listener: socket.socket,
    announce: Callable[[str], None],
    others: Sequence[socket.socket] = (),
) -> None:
    """Serve an application as ``listen`` does. Call ``announce`` with the address."""
    config = http_config(settings, app, served.metrics)
    server = DrainedServer(config, served, settings.server.drain_s)
    # uvicorn sets this handler, too, but only while it serves. A signal just before or after that
    # must not kill the process, because the exit code after a signal is 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    listeners = [listener, *others]
    for each in listeners:
        listen_on(each, LISTEN_BACKLOG)
    announce(url_of(listener))
    for other in others:
        log.info(f"also on {url_of(other)}")
    server.run(sockets=listeners)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def http_config(settings: Config, app: FastAPI, metrics: HttpMetrics) -> uvicorn.Config:
    """Return uvicorn's configuration, and increase the process's limit of open files."""
    limits = settings.limits
    allowed = connections_that_fit(limits.max_connections)
    if allowed < limits.max_connections:
        log.warning(
            f"limits.max_connections is {limits.max_connections}, but the system allows open files "
            f"for {allowed} only: raise `ulimit -n`, or lower the setting"
        )
        limits = limits.model_copy(update={"max_connections": allowed})
    return uvicorn.Config(
        app,
        host=settings.server.host,
        port=settings.server.port,
        http=guarded_protocol(limits, metrics),
        # Without this option, uvicorn uses uvloop if that is installed.
        loop="asyncio",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        backlog=ACCEPTS_AT_ONCE,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        server_header=False,
        proxy_headers=False,
        access_log=False,
        log_config=None,
        # Only errors are logged, because clients can trigger uvicorn's warnings at will.
        log_level="error",
    )


def connections_that_fit(connections: int) -> int:
    """Return how many of ``connections`` the raised limit of file descriptors allows, at least 1.
    Each counts twice, because beside it another one may be open that is being refused."""
    allowed = raise_descriptor_limit()
    others = min(OTHER_DESCRIPTORS, max(FEWEST_OTHER_DESCRIPTORS, allowed // 2))
    return max(1, min(connections, (allowed - others) // 2))


class FreshState(ServerState):
    """Makes the header Date when a response needs it. uvicorn's timer would make it each second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__()
        self._config = config

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"date", formatdate(usegmt=True).encode()), *self._config.encoded_headers]

    @default_headers.setter
    def default_headers(self, _: list[tuple[bytes, bytes]]) -> None:
        """Ignore the headers that uvicorn sets, because their date would become old."""


class GuardedServer(uvicorn.Server):
    """A server that lets many connections wait in the backlog, and accepts few at a time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start with a small backlog: asyncio accepts a whole backlog at once. Then enlarge it."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)


class DrainedServer(GuardedServer):
    """A server that lets running answers end after a signal, and answers 503 to new requests. Idle
    connections stay open: a request may be on its way. If the engine fails, the server ends."""

    def __init__(self, config: uvicorn.Config, served: Served, drain_s: float) -> None:
        super().__init__(config)
        self.server_state = FreshState(config)
        self._served = served
        self._drain = served.drain
        self._drain_s = drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._drain.begin()

    async def main_loop(self) -> None:
        """Wait for the end. uvicorn's own loop wakes an idle process ten times a second."""
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(begun.set)

        self._drain.wake = wake
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(begun.wait(), ENGINE_POLL_S)

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server must end."""
        if await super().on_tick(counter) or not self._served.alive:
            return True
        if not self._drain.draining:
            return False
        if count := self._drain.answering:
            answers = f"{count} running answer{'s' if count > 1 else ''}"
            log.info(
                f"ending; waits up to {self._drain_s:g} s for {answers}: Ctrl-C again, or a second "
                "signal, ends at once"
            )
        else:
            log.info("ending")
        await self._drain.finish(self._served, self._drain_s)
        return True
