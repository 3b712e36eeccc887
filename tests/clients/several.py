"""The model that says what it is told, behind the front of several models: ``python -m
tests.clients.several``. Its process is started as that of any model, and says what it is told."""

import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from server.chat.drain import Drain
from server.cli.log import configure_log
from server.cli.model_process import Control
from server.config import Config
from server.http.listener import reserve
from server.http.server import listen, serve_app
from server.protocol.ollama.answer import ModelFacts
from server.supervisor.app import create_front
from server.supervisor.front import Front
from server.supervisor.models import MemoryNeeds, ModelSupervisor
from server.supervisor.process import ModelProcess, Start
from server.text.tokenizer import Tokenizer
from tests.clients.models import tokenizer_only
from tests.clients.parrot import (
    MAX_MODEL_LEN,
    STOP_TIMEOUT_S,
    Parrot,
    told_engine,
    told_service,
)
from tests.engines import VOCAB
from tests.server.harness import MODEL, OTHER_NAMES

COMMAND = (sys.executable, "-m", "tests.clients.several", "process")
SETTINGS = Config.model_validate(
    {
        "server": {"port": 0, "drain_s": 1},
        "models": {"aliases": dict.fromkeys(OTHER_NAMES, MODEL), "pinned": [MODEL]},
    }
)
BYTES = 1 << 40


@dataclass
class ParrotSource:
    """Has no files: all that is asked of them is known."""

    folder: Path
    template: Tokenizer
    name: str = MODEL
    pinned: bool = True

    def needs(self) -> MemoryNeeds:
        return MemoryNeeds(1, 1, BYTES, MAX_MODEL_LEN)

    def facts(self) -> ModelFacts:
        return ModelFacts()

    def abilities(self) -> tuple[tuple[str, ...], str]:
        return ("completion", "tools", "thinking"), self.template.template.text

    async def launch(self, needs: MemoryNeeds, kv_bytes: int) -> ModelProcess:
        del needs
        start = Start(COMMAND, self.folder, STOP_TIMEOUT_S)
        return await ModelProcess.start(self.name, 1, start, {"kv_limit": kv_bytes})


def serve_front() -> None:
    """Serve on a free port until told to end."""
    configure_log(SETTINGS.log)
    with (
        tempfile.TemporaryDirectory() as folder,
        reserve(SETTINGS.server.host, SETTINGS.server.port) as listener,
    ):
        tokenizer = Tokenizer(tokenizer_only(Path(folder) / "tokenizer", VOCAB))
        sources = [ParrotSource(Path(folder), tokenizer)]
        models = ModelSupervisor(SETTINGS.models, BYTES)
        models.update(sources)
        front = Front(SETTINGS, models, lambda: sources)

        def announce(url: str) -> None:
            print(f"serving a parrot on {url}", flush=True)

        serve_app(SETTINGS, create_front(front), front, listener, announce)


def serve_process(listener: socket.socket, connection: socket.socket) -> None:
    """Serve on a socket that was given, as long as somebody holds the other end."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(tokenizer_only(Path(folder), VOCAB))
    client = told_engine(Parrot(tokenizer))
    with listener, connection, Control(connection) as control:
        start = control.read()
        assert start is not None
        service = told_service(client, tokenizer, SETTINGS)
        service = replace(service, model=replace(service.model, any_name=True))

        def ready(drain: Drain, _: str) -> None:
            control.begin(client, drain, start["kv_limit"])

        try:
            listen(SETTINGS, service, listener, ready)
        finally:
            client.stop(STOP_TIMEOUT_S)


if __name__ == "__main__":
    if sys.argv[1:2] == ["process"]:
        serve_process(*(socket.socket(fileno=int(number)) for number in sys.argv[2:4]))
    else:
        serve_front()
