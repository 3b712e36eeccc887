"""A replica: a whole engine in a process of Ray's, without a front."""

import socket
from collections.abc import AsyncGenerator
from typing import Any

from engine.client import EngineClient
from engine.machine import raise_descriptor_limit, use_one_arena
from engine.memory_map import MemoryMap
from engine.monitor import EngineMonitor
from engine.pressure import pressure_source
from engine.types import Submission
from server.cli.log import configure_log
from server.cli.model_files import read_model
from server.cli.serve import (
    STOP_TIMEOUT_S,
    engine_error,
    grammar_compiler,
    keep_awake,
    start_engine,
)
from server.config import Config, StartError
from server.http.idle_memory import keep_what_is_there
from server.ray.engine_replica import EngineReplica
from server.ray.facts import Facts, check_alike, facts_of
from server.ray.guard import Guard
from server.ray.messages import Numbered, Refusal, ReplicaReport, Route


class NotReadyError(Exception):
    """The engine does not generate."""


class Replica:
    """What Ray Serve starts, asks and ends. Its methods' first argument is for the router alone."""

    _guard: Guard | None = None
    _client: EngineClient | None = None
    _monitor: EngineMonitor | None = None

    def __init__(
        self, model: str, settings: dict[str, Any], head: Facts, name: str | None = None
    ) -> None:
        """model: its name, which may be a folder on every machine. settings: Config as JSON. head:
        what must be the same here. name: which no other replica has; Ray's, where there is none.
        Raises StartError."""
        self._guard = Guard()
        use_one_arena()
        raise_descriptor_limit()
        config = Config.model_validate(settings)
        configure_log(config.log)
        host = socket.gethostname()
        files = read_model(model, config)
        check_alike(host, facts_of(files.plan.checkpoint.path), head)
        client = start_engine(config, files.plan, lambda done, total: None)
        grammars = grammar_compiler(
            config, files.tokenizer, files.served, files.plan.checkpoint.vocab_size
        )
        if not files.plan.checkpoint.embeds:
            grammars.load()
        self._monitor = EngineMonitor(
            client,
            watchdog_s=config.engine.watchdog_s,
            exit_code=lambda: engine_error(files.plan.on_gpu and client.substrate_failed).exit_code,
            pressure=pressure_source() if config.cache.heed_pressure else None,
            awake=keep_awake(config),
        )
        self._monitor.start()
        keep_what_is_there()
        self._engine = EngineReplica(
            name or own_name(), host, client, grammars, config.server.ready_timeout_s
        )
        self._client = client
        self._attached = False

    async def generate(
        self, _: Route, submission: Submission
    ) -> AsyncGenerator[list[Numbered] | Refusal, None]:
        """Answer a prompt."""
        async for batch in self._engine.generate(submission):
            yield batch

    async def report(self, _: Route) -> ReplicaReport:
        """Say how it is."""
        return self._engine.report()

    async def memory_map(self, _: Route) -> MemoryMap:
        """Say what its memory holds."""
        assert self._client is not None
        return await self._client.memory_map()

    async def check_health(self) -> None:
        """Raise NotReadyError where it does not generate. Ray asks it first when it is built."""
        assert self._client is not None
        assert self._guard is not None
        if not self._attached:
            self._guard.started()
            self._client.attach()
            self._attached = True
        if not await self._engine.generates():
            raise NotReadyError("the engine does not generate a token in time")

    def __del__(self) -> None:
        """End the engine: nobody is answered any more. Ray calls it first."""
        if self._client is not None:
            self._client.stop(STOP_TIMEOUT_S)
        if self._monitor is not None:
            self._monitor.stop()
        if self._guard is not None:
            self._guard.end()


def own_name() -> str:
    """Return what Ray calls this replica."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def why_not_here(model: str, settings: dict[str, Any], head: Facts) -> str:
    """Return why this machine cannot have a replica; nothing where it can. Fetches the model where
    it is missing."""
    config = Config.model_validate(settings)
    try:
        files = read_model(model, config)
        check_alike(socket.gethostname(), facts_of(files.plan.checkpoint.path), head)
    except StartError as error:
        return str(error)
    return ""
