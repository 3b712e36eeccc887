"""Engines are shared where a test leaves nothing behind in them."""

import json
import logging
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog
from fastapi import FastAPI
from huggingface_hub import close_session, constants
from typer.testing import CliRunner, Result

from engine import kv_backend
from engine.machine import MachineMemory
from kvcache.child import Child, Limits
from kvcache.selftest.run import SelfTestReport
from server.catalogue import folder_reader
from server.cli import serve
from server.cli.commands import app as command
from server.http import server
from server.http.listener import reserve
from server.routes.service import Service
from server.text.tokenizer import Tokenizer
from tests.engines import VOCAB
from tests.hostile_models import READ_ELSEWHERE
from tests.kvcache.metal_double import Device, install
from tests.models import write_tokenizer
from tests.server.commands import Run
from tests.server.harness import (
    Engine,
    engine_fixture,
    http_client,
    make_service,
    running,
    token_id,
)
from tests.server.hub_server import Files, Hub, files_of, serving_hub

GIB = 1024**3


class ThisProcess(Child):
    """Calls functions here, where coverage is counted, and no process has to start."""

    def start(self) -> Any: ...

    def call(self, limits: Limits, work: Any, *arguments: Any) -> Any:
        return json.loads(json.dumps(work(*json.loads(json.dumps(arguments)))))


@pytest.fixture(autouse=True)
def folders_are_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_reader, "Child", ThisProcess)


@pytest.fixture
def folders_are_read_elsewhere(
    folders_are_read_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of their own, as they are for users."""
    monkeypatch.setattr(folder_reader, "Child", Child)


@pytest.fixture
def impatient_reader(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hostile folders of this kind are read as they are for users, and in less time."""
    if kind in READ_ELSEWHERE:
        request.getfixturevalue("folders_are_read_elsewhere")
    monkeypatch.setattr(
        folder_reader, "LIMITS", replace(folder_reader.LIMITS, cpu_s=2.0, wall_s=2.0)
    )


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and words of their own number."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB)
    made = Tokenizer(folder)
    # Found out once: tests may put another template into it.
    assert made.template.takes_late_system
    return made


@pytest.fixture
def small_mac(monkeypatch: pytest.MonkeyPatch) -> Device:
    """This machine is a Mac with 8 GiB, of which other programs leave an eighth of one."""
    device = install(monkeypatch)
    device.said["recommended_working_set_bytes"] = 8 * GIB * 2 // 3
    monkeypatch.setattr(kv_backend, "run_selftest", lambda *_: SelfTestReport((), "", 1.0))
    monkeypatch.setattr(kv_backend, "machine_memory", lambda: MachineMemory(8 * GIB, GIB // 8))
    return device


# A pause between two requests forgets no prefix.
shared_engine = engine_fixture("session", prefix_keep_s=1000.0)


@pytest.fixture
def engine(shared_engine: Engine) -> Engine:
    """Nobody has told it what to say, and all that was asked before is counted."""
    shared_engine.script.clear()
    shared_engine.rest()
    return shared_engine


@pytest.fixture
def service(engine: Engine, tokenizer: Tokenizer) -> Service:
    """Ends answers at <|im_end|>, whatever its model was told before."""
    engine.script.clear()
    end = token_id(tokenizer, "<|im_end|>")
    return make_service(engine.client, tokenizer, stop_token_ids=frozenset({end}))


@pytest.fixture
async def app(service: Service) -> AsyncIterator[FastAPI]:
    async with running(service) as app:
        yield app


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(app) as client:
        yield client


@pytest.fixture
def broken(app: FastAPI) -> str:
    """A route that has a bug."""

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the secret of the house")

    return "/broken"


@pytest.fixture
def own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log may be configured: afterwards it is as before."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    yield
    for handler in root.handlers:
        handler.close()
    structlog.reset_defaults()


@pytest.fixture
def quire(monkeypatch: pytest.MonkeyPatch, own_log: None) -> Run:
    """Runs the command in this process; it must end before it loads weights or lets anybody
    connect. Its port is any that is free."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("too early")

    monkeypatch.setattr(serve, "start_engine", never)
    monkeypatch.setattr(server, "listen_on", never)
    monkeypatch.setattr(serve, "reserve", lambda host, _: reserve(host, 0))

    def run(*arguments: str | Path) -> Result:
        return CliRunner().invoke(command, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub of this machine's, and an empty cache."""
    with serving_hub() as started:
        template = started.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", started.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield started
        close_session()


@pytest.fixture
def lm_studio(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """LM Studio's folder in a home folder of the test's, with a model and two of GGUF."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LMSTUDIO_HOME")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "home/.lmstudio/models"
    shutil.copytree(tiny_model, folder / "mlx-community/Tiny-4bit")
    for name in ("bartowski/Tiny-GGUF", "zed/Z-GGUF"):
        (folder / name).mkdir(parents=True)
        (folder / name / "Q4_K_M.gguf").write_bytes(b"GGUF" * 10)
    return folder


@pytest.fixture(scope="module")
def tiny_files(tiny_model: Path) -> Files:
    return files_of(tiny_model) | {"README.md": b"words", "pytorch_model.bin": b"other weights"}
