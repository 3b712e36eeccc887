"""Several models behind a front, whose processes are stand-ins."""

import asyncio
import itertools
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from server.config import Config
from server.http.server import DrainedServer, http_config
from server.protocol.ollama.answer import ModelFacts
from server.supervisor.app import create_front
from server.supervisor.front import Front
from server.supervisor.models import ManagedModel, MemoryNeeds, ModelSupervisor
from server.supervisor.process import LoadError, ModelProcess, Start
from tests.server.harness import DEADLINE_S, eventually
from tests.simulation.runner import Clock

STAND_IN = Path(__file__).parent / "stand_in.py"
NEEDS = MemoryNeeds(fixed_bytes=100, least_kv_bytes=20, most_kv_bytes=50, max_model_len=64)


@dataclass
class Several:
    """Models, and what their processes do otherwise."""

    folder: Path
    budget_bytes: int
    config: Config
    does: dict[str, dict[str, Any]] = field(default_factory=dict)
    needs: dict[str, MemoryNeeds | LoadError] = field(default_factory=dict)
    names: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    created: dict[str, int] = field(default_factory=dict)
    stop_s: float = DEADLINE_S
    clock: Clock = field(default_factory=lambda: Clock(1000.0))
    command: tuple[str, ...] = (sys.executable, str(STAND_IN))

    def __post_init__(self) -> None:
        self.models = ModelSupervisor(self.config.models, self.budget_bytes, clock=self.clock)
        self.models.update(self.sources())
        self.front = Front(self.config, self.models, self.sources)
        self._numbers = itertools.count()

    def sources(self) -> "list[Source]":
        return [Source(self, name, self.created.get(name, 0)) for name in self.names]

    async def launch(self, source: "Source", kv_bytes: int) -> ModelProcess:
        """A process has a quote behind its name for every time that its files were replaced."""
        start = Start(self.command, self.folder, self.stop_s)
        message = {
            "model": source.name + "'" * source.created,
            "settings": self.does.get(source.name, {}),
            "kv_limit": kv_bytes,
        }
        return await ModelProcess.start(source.name, next(self._numbers), start, message)

    def model(self, name: str) -> ManagedModel:
        return self.models.models[name]

    def pid(self, name: str) -> int:
        process = self.model(name).process
        assert process is not None
        return process.pid


Make = Callable[..., Several]


@dataclass
class Source:
    """One of them."""

    models: Several
    name: str
    created: int

    @property
    def pinned(self) -> bool:
        return self.name in self.models.config.models.pinned

    def needs(self) -> MemoryNeeds:
        found = self.models.needs.get(self.name, NEEDS)
        if isinstance(found, LoadError):
            raise found
        return found

    def facts(self) -> ModelFacts:
        return ModelFacts("qwen3", 4_000_000_000, "4bit", 2_000_000_000)

    def abilities(self) -> tuple[tuple[str, ...], str]:
        return ("completion", "tools"), "the template"

    async def launch(self, needs: MemoryNeeds, kv_bytes: int) -> ModelProcess:
        del needs
        return await self.models.launch(self, kv_bytes)


@pytest.fixture
def several(tmp_path: Path) -> Make:
    """Makes the models a, b and c. budget_bytes: for all of them, unless less is said."""

    def make(
        budget_bytes: int = 1000, models: dict[str, Any] | None = None, **more: Any
    ) -> Several:
        settings = {"models": models or {}} | more.pop("settings", {})
        return Several(tmp_path, budget_bytes, Config.model_validate(settings), **more)

    return make


@asynccontextmanager
async def served(models: Several) -> AsyncIterator[tuple[Several, httpx2.AsyncClient]]:
    """The models, and a client of their front. Afterwards nothing of them is left."""
    before = psutil.Process().children()
    app = create_front(models.front)
    server = DrainedServer(http_config(models.config, app, models.front.metrics), models.front, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await eventually(lambda: server.started)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with httpx2.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
                yield models, client
        finally:
            models.front.drain.begin()
            async with asyncio.timeout(DEADLINE_S):
                await serving
    assert not list(models.folder.glob("*.sock"))
    left = set(psutil.Process().children()) - set(before)
    assert not [child.cmdline() for child in left if child.status() != "zombie"]
