"""A replica: a Ray process that runs an engine, but no HTTP server."""

import platform
import socket
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.client import EngineClient, TokenStream
from engine.machine import raise_descriptor_limit, use_one_arena
from engine.memory_map import MemoryMap
from engine.models.identity import ModelIdentity
from engine.monitor import EngineMonitor
from engine.types import (
    FORM_LIMITS,
    EngineDeadError,
    FinishReason,
    QueueFullError,
    Request,
    TokenEvent,
)
from server.chat.admission import generates
from server.cli.log import configure_log
from server.cli.model_files import ModelFiles, read_model
from server.cli.serve import STOP_TIMEOUT_S, start_model
from server.config import Config, StartError
from server.http.app import freeze_objects
from server.protocol.wire_errors import REPLICA_LOST, REPLICAS_FULL
from server.ray.replica_calls import (
    NumberedEvent,
    ReplicaReport,
    Route,
    UncompiledConstraint,
)
from server.ray.watchdog import Watchdog
from server.text.grammar.compiler import GrammarCompiler
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.worker import GrammarsFullError

# If no answer has got a token for this many seconds, the replica sends an empty list.
SIGN_OF_LIFE_S = 1.0

Facts = Mapping[str, str]
"""``{name: version or digest}``. All machines' values must equal those of the first (head)."""


def facts_of(folder: Path) -> Facts:
    """Return this machine's Facts. If the digests of the weights in ``folder`` are not stored, this
    reads all weights. Raises CheckpointError, OSError."""
    return {
        "quire": version("quire"),
        "ray": version("ray"),
        "Python": platform.python_version(),
        "the model's files": ModelIdentity(folder).digest("").hex(),
    }


def check_alike(host: str, here: Facts, head: Facts) -> None:
    """Raise StartError if ``host`` differs from the head. The error names the first difference."""
    for name, ours in here.items():
        if ours != head[name]:
            # The error shows 16 characters, by which two versions or digests can be told apart.
            raise StartError(
                f"{host} is not like the head of the cluster: {name} is {ours[:16]} there and "
                f"{head[name][:16]} on the head"
            )


class EngineReplica:
    """Runs the HTTP server's calls on an engine. Only Ray's router uses the Route arguments."""

    def __init__(
        self, name: str, client: EngineClient, grammars: GrammarCompiler, ready_timeout_s: float
    ) -> None:
        """A health check waits up to ``ready_timeout_s`` seconds for a token."""
        self._name = name
        self._client = client
        self._grammars = grammars
        self._ready_timeout_s = ready_timeout_s

    async def generate(
        self, _: Route, request: Request
    ) -> AsyncGenerator[list[NumberedEvent] | str, None]:
        """Yield what ``RayReplicas.generate`` yields. Yield an empty list at the start and after
        each second without an event."""
        yield []
        try:
            streams = await self._submit(request)
        except (QueueFullError, GrammarsFullError):
            yield REPLICAS_FULL
            return
        except EngineDeadError:
            yield REPLICA_LOST
            return
        except GrammarError as error:
            # The head could compile the grammar, but this machine is slower or has less memory.
            message = f"{FORM_LIMITS}: {error}"
            failed = TokenEvent(0, None, FinishReason.ERROR, message=message)
            yield [(index, failed) for index in range(len(request.params))]
            return
        running = dict(enumerate(streams))
        try:
            while running:
                batches = await TokenStream.next_batches([*running.values()], SIGN_OF_LIFE_S)
                numbered = zip(list(running), batches, strict=True)
                events = [(index, event) for index, batch in numbered for event in batch]
                for index, event in events:
                    if event.finish is not None:
                        del running[index]
                yield events
        finally:
            for stream in streams:
                stream.close()

    async def _submit(self, request: Request) -> list[TokenStream]:
        if (sent := request.constraint) is not None:
            assert isinstance(sent, UncompiledConstraint)
            constraint = await self._grammars.compile(sent.spec, sent.begun)
            request = replace(request, constraint=constraint)
        return self._client.submit(request)

    async def report(self, _: Route) -> ReplicaReport:
        client, host = self._client, socket.gethostname()
        figures = client.limits, client.stats, client.capacity, client.step_age_s, client.pressure
        return ReplicaReport(self._name, host, *figures)

    async def memory_map(self, _: Route) -> MemoryMap:
        return await self._client.memory_map()

    async def check_health(self) -> None:
        """Let the engine generate a token ahead of its queue. Raises RuntimeError if that fails."""
        if not (self._client.alive and await generates(self._client, self._ready_timeout_s)):
            raise RuntimeError("the engine does not generate a token in time")


class Replica(EngineReplica):
    """The class that Ray Serve runs in the process of each replica."""

    _watchdog: Watchdog | None = None
    _monitor: EngineMonitor | None = None
    _is_attached = False

    def __init__(
        self, model: str, settings: dict[str, Any], head: Facts, name: str | None = None
    ) -> None:
        """``model`` is a name, or a folder that all machines have. ``settings`` are the values of
        Config. ``head`` is the head's Facts. Ray chooses a missing ``name``. Raises StartError."""
        self._watchdog = Watchdog()
        use_one_arena()
        raise_descriptor_limit()
        config = Config.model_validate(settings)
        configure_log(config.log)
        files = _read_alike(model, config, head)
        client, grammars, self._monitor = start_model(config, files, lambda done, total: None)
        freeze_objects()
        super().__init__(name or own_name(), client, grammars, config.server.ready_timeout_s)

    async def check_health(self) -> None:
        # Ray first calls this right after __init__, during which no event loop runs.
        assert self._watchdog is not None
        if not self._is_attached:
            self._watchdog.start_beating()
            self._client.attach()
            self._is_attached = True
        await super().check_health()

    def __del__(self) -> None:
        """End the engine. Ray calls this method before it ends the process."""
        if self._monitor is not None:
            self._client.stop(STOP_TIMEOUT_S)
            self._monitor.stop()
        if self._watchdog is not None:
            self._watchdog.end()


def own_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _read_alike(model: str, config: Config, head: Facts) -> ModelFiles:
    """Read a model, and download missing files. Raises StartError if this machine cannot serve the
    model, or differs from the head."""
    files = read_model(model, config)
    check_alike(socket.gethostname(), facts_of(files.plan.checkpoint.path), head)
    return files


def why_not_here(model: str, settings: dict[str, Any], head: Facts) -> str:
    """Return why this machine cannot have a replica, or an empty text if it can."""
    try:
        _read_alike(model, Config.model_validate(settings), head)
    except StartError as error:
        return str(error)
    return ""
