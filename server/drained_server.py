"""uvicorn's server, which ends with its engine, and drains before it ends."""

import signal
import socket
from types import FrameType

import structlog
import uvicorn

from engine.client import EngineClient
from server.config import Config
from server.drain import Drain
from server.http import LISTEN_BACKLOG, GuardedServer, http_config
from server.listener import listen_on
from server.service import Service

log = structlog.get_logger("quire")


class DrainedServer(GuardedServer):
    """Told to end, it goes on listening, so that whoever comes is told to come back later, until
    those that were there are answered. Connections that are idle stay as long: closed now, one on
    which a request is under way would be reset. What can only refuse, because its engine has
    failed, ends at once: it is better started again."""

    def __init__(
        self, config: uvicorn.Config, client: EngineClient, drain: Drain, drain_s: float
    ) -> None:
        super().__init__(config)
        self._client = client
        self._drain = drain
        self._drain_s = drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal to end."""
        self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to close; called ten times a second."""
        if await super().on_tick(counter) or not self._client.alive:
            return True
        if not self._drain.draining:
            return False
        wait = "a second signal does not wait for them"
        running = f"; running answers have {self._drain_s:g} s more: {wait}"
        log.info(f"ending{running if self._drain.answering else ''}")
        await self._drain.finish(self._client, self._drain_s)
        return True


def listen(settings: Config, service: Service, listener: socket.socket) -> None:
    """Serve until told to end, or until the engine has failed. Raises SettingError."""
    config = http_config(settings, service)
    drain_s = settings.server.drain_s
    server = DrainedServer(config, service.client, service.drain, drain_s)
    # uvicorn raises the signal that ended it again, for whoever listened before: it has done its
    # work, and the process ends with 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    listen_on(listener, LISTEN_BACKLOG)
    host, port = listener.getsockname()[:2]
    log.info(
        f"serving {service.model.id} on http://{host}:{port}", max_model_len=service.max_model_len
    )
    server.run(sockets=[listener])
