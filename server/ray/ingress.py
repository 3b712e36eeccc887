"""The ingress: a Ray process that runs quire's HTTP server and sends prompts to the replicas."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import structlog

from engine.machine import raise_descriptor_limit
from engine.types import TokenConstraint
from kvcache.selftest.machine import footprint_with
from server.catalogue.folder_reader import FolderReader
from server.catalogue.hub import find_model
from server.cli.log import configure_log
from server.cli.model_files import (
    check_files,
    check_found,
    checkpoint_of,
    model_errors,
    model_facts,
)
from server.cli.salt_secret import read_salts
from server.cli.serve import grammar_compiler
from server.config import Config
from server.http.app import create_app
from server.http.listener import listen_on, reserve, reserved_for_ollama
from server.http.server import LISTEN_BACKLOG, DrainedServer, http_config, url_of
from server.metrics import Metrics
from server.metrics.registry import About
from server.ray.membership import ReplicasCollector
from server.ray.remote_engine import RemoteEngine
from server.ray.replica_calls import RayReplicas, UncompiledConstraint
from server.routes.service import Service
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.constraint_spec import ConstraintSpec
from server.text.grammar.constraints import CompiledGrammar

log = structlog.get_logger("quire")


class CheckingCompiler(GrammarCompiler):
    """Compiles an answer's grammar only to refuse a bad one early. Replicas compile it again."""

    async def compile(
        self, spec: ConstraintSpec, begun: str = "", grammar: CompiledGrammar | None = None
    ) -> TokenConstraint | None:
        if await super().compile(spec, begun, grammar) is None:
            return None
        return cast(TokenConstraint, UncompiledConstraint(spec, begun))


class Ingress:
    """Runs the HTTP server in a process of Ray Serve. Clients connect to the server directly."""

    def __init__(self, replicas: Any, model: str, settings_file: str) -> None:
        """``replicas`` is Ray's DeploymentHandle. ``settings_file`` contains a Config as JSON."""
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
        """At Ray's first call, start the HTTP server. Raises RuntimeError once the server ended."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        elif self._serving.done():
            raise RuntimeError(f"the front has ended: {self._serving.exception()}")

    async def url(self) -> str:
        """Return the HTTP server's address, or "" before it listens. Raises the server's error."""
        assert self._serving is not None
        if self._serving.done():
            self._serving.result()
        return self._url if self._server is not None and self._server.started else ""

    async def drain(self) -> None:
        """Refuse new requests, and wait until running requests and the server have ended."""
        if self._service is not None and self._serving is not None:
            self._service.drain.begin()
            await asyncio.wait((self._serving,))

    async def _serve(self) -> None:
        settings = self._settings
        shares = len(settings.access.api_keys) > 1
        engine = RemoteEngine(
            RayReplicas(self._replicas),
            max_share_ratio=settings.limits.max_key_share_ratio if shares else 1.0,
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
            self._server = DrainedServer(config, service, settings.server.drain_s)
            await self._server.serve(sockets=[listener, *others])
        log.info("ended")


def make_service(model: str, settings: Config, engine: RemoteEngine) -> Service:
    """Make the state of the HTTP routes, with the replicas as its engine. Raises StartError."""
    with model_errors(), FolderReader() as reader:
        model_files = find_model(model, settings.models.folders)
        check_found(reader, model_files, settings)
        checkpoint = checkpoint_of(model_files, settings)
        tokenizer, served = check_files(model_files, checkpoint, settings)
    served = replace(served, facts=model_facts(checkpoint))
    grammars = grammar_compiler(
        settings, tokenizer, served, checkpoint.vocab_size, CheckingCompiler
    )
    if not checkpoint.embeds and (warning := grammars.load()):
        log.warning(warning)
    metrics = Metrics(
        engine,
        About(served.id, "replicas", "", engine.limits.max_model_len),
        settings=settings.metrics,
        footprint=footprint_with,
    )
    metrics.registry.register(ReplicasCollector(engine.members))
    salts = read_salts(settings.access.salt_secret_file)
    figures = engine.members.figures
    return Service(settings, served, tokenizer, engine, metrics, grammars, salts, replicas=figures)
