"""Real servers with small limits: the production protocol around an engine that recalls.

``python -m tests.abuse.servers`` serves with very few file descriptors until it is killed, and
writes its port.
"""

import asyncio
import os
import resource
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from server.config import Config
from server.http.app import create_app
from server.http.server import LISTEN_BACKLOG, GuardedServer, http_config
from server.routes.service import Service
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.models import write_tokenizer
from tests.server.harness import DEADLINE_S, Engine, eventually, make_service, start_engine

KEY = "sk-0123456789abcdef"
# Connections of the server with few descriptors.
FEW = 12


@dataclass(frozen=True, slots=True)
class Abused:
    """A server and the handles on its inside."""

    port: int
    server: uvicorn.Server
    service: Service
    engine: Engine

    @property
    def connections(self) -> int:
        """Those that are open."""
        return len(self.server.server_state.connections)

    def refused(self, reason: str) -> float:
        """How often that was the reason."""
        name, labels = "quire_refused_requests_total", {"reason": reason}
        value = self.service.metrics.registry.get_sample_value(name, labels)
        assert value is not None
        return value

    async def is_empty(self) -> None:
        """Waits until nothing is left of any client: connections, requests, blocks."""
        await eventually(lambda: self.connections == 0 and not self.server.server_state.tasks)
        await self.is_free()

    async def is_free(self) -> None:
        """Waits until nothing is computed, and all blocks are free."""

        def free() -> bool:
            stats = self.engine.client.stats
            kv = stats.kv
            idle = not (self.engine.client.in_flight or stats.running or stats.waiting)
            return idle and kv is not None and kv.free_bytes == kv.capacity_bytes

        await eventually(free)


@asynccontextmanager
async def abused(
    tokenizer: Tokenizer,
    settings: dict[str, Any] | None = None,
    *,
    send_buffer_bytes: int | None = None,
    **changes: Any,
) -> AsyncIterator[Abused]:
    """A server on a port of its own. send_buffer_bytes: what the system keeps of answers. changes:
    of the engine."""
    config = Config.model_validate(settings or {})
    engine = start_engine(**changes)
    service = make_service(engine.client, tokenizer, config)
    server = GuardedServer(http_config(config, create_app(service), service.metrics))
    with socket.create_server(("127.0.0.1", 0), backlog=LISTEN_BACKLOG) as listener:
        if send_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        try:
            yield Abused(listener.getsockname()[1], server, service, engine)
        finally:
            engine.gate.open()
            server.should_exit = True
            async with asyncio.timeout(DEADLINE_S):
                await serving
    engine.stop()


async def serve_few() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCAB)
        async with abused(Tokenizer(Path(folder)), {"limits": {"max_receive_s": 30}}) as server:
            used = len(os.listdir("/proc/self/fd"))
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + FEW, hard))
            sys.stdout.write(f"{server.port}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_few())
