"""The ingress: quire's whole HTTP front in a process of Ray's, whose engines are replicas."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from engine.client import MAX_BACKLOG
from engine.machine import raise_descriptor_limit
from kvcache.selftest.machine import footprint_with
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub import find_model
from server.chat.salts import Salts
from server.cli.log import configure_log
from server.cli.model_files import (
    check_files,
    check_found,
    checkpoint_of,
    model_errors,
    model_facts,
)
from server.cli.salt_secret import salt_secret
from server.cli.serve import grammar_compiler
from server.config import Config
from server.http.app import create_app
from server.http.listener import listen_on, reserve, reserved_for_ollama
from server.http.server import LISTEN_BACKLOG, DrainedServer, http_config, url_of
from server.metrics import Metrics
from server.metrics.registry import About
from server.ray.messages import SendingCompiler
from server.ray.metrics import ClusterCollector
from server.ray.remote_engine import RayReplicas, RemoteEngine
from server.routes.service import Service
from server.text.calls.written import WrittenCalls
from server.text.reasoning_cache import ReasoningCache

SUBSTRATE = "replicas"

log = structlog.get_logger("quire")


class EndedError(Exception):
    """The front has ended."""


class Ingress:
    """What Ray Serve starts and ends. Clients reach it on a socket of its own."""

    def __init__(self, replicas: Any, model: str, settings_file: str) -> None:
        """replicas: a handle. settings_file: Config as JSON, with its secrets, for this user
        alone."""
        raise_descriptor_limit()
        self._settings = Config.model_validate_json(Path(settings_file).read_text())
        configure_log(self._settings.log)
        self._model = model
        self._replicas = replicas
        self._serving: asyncio.Task[None] | None = None
        self._server: DrainedServer | None = None
        self._service: Service | None = None
        self._url = ""

    async def check_health(self) -> None:
        """Begin to listen, when Ray asks for the first time: then the event loop runs. Raise
        EndedError where it does not listen any more."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        elif self._serving.done():
            raise EndedError(f"the front has ended: {self._serving.exception()}")

    async def url(self) -> str:
        """Return where clients come; nothing as long as they cannot. Raises what keeps it from
        listening."""
        assert self._serving is not None
        if self._serving.done():
            self._serving.result()
        return self._url if self._server is not None and self._server.started else ""

    async def drain(self) -> None:
        """Refuse new requests, wait until those that run have ended or their time is over, and
        end."""
        if self._service is not None and self._serving is not None:
            self._service.drain.begin()
            await asyncio.wait((self._serving,))

    async def _serve(self) -> None:
        settings = self._settings
        engine = RemoteEngine(
            RayReplicas(self._replicas),
            max_backlog=MAX_BACKLOG,
            max_share_ratio=(
                settings.limits.max_key_share_ratio if len(settings.access.api_keys) > 1 else 1.0
            ),
        )
        with (
            reserve(settings.server.host, settings.server.port) as listener,
            reserved_for_ollama(settings.server) as others,
        ):
            await engine.ready()
            service = self._service = make_service(self._model, settings, engine)
            config = http_config(settings, create_app(service), service.metrics)
            for each in (listener, *others):
                listen_on(each, LISTEN_BACKLOG)
            self._url = url_of(listener)
            drain_s = settings.server.drain_s
            self._server = DrainedServer(config, engine, service.drain, drain_s)
            await self._server.serve(sockets=[listener, *others])
        log.info("ended")


def make_service(model: str, settings: Config, engine: RemoteEngine) -> Service:
    """Put the front together, around engines elsewhere. Raises StartError."""
    with model_errors(), FolderReader() as reader:
        found = find_model(model, settings.models.folders)
        check_found(reader, found, settings)
        checkpoint = checkpoint_of(found, settings)
        tokenizer, served = check_files(found, checkpoint, settings)
    served = replace(served, facts=model_facts(checkpoint))
    grammars = grammar_compiler(settings, tokenizer, served, checkpoint.vocab_size, SendingCompiler)
    if not checkpoint.embeds and (warning := grammars.load()):
        log.warning(warning)
    limits = settings.limits
    metrics = Metrics(
        engine,
        About(served.id, SUBSTRATE, "", engine.limits.max_model_len),
        settings=settings.metrics,
        footprint=footprint_with,
    )
    metrics.registry.register(ClusterCollector(engine))
    return Service(
        settings,
        served,
        tokenizer,
        engine,
        metrics,
        grammars,
        WrittenCalls(limits.max_written_call_bytes),
        ReasoningCache(limits.max_thought_bytes),
        Salts(salt_secret(settings.access.salt_secret_file)),
        replicas=engine.members.figures,
    )
