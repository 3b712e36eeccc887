"""A replica: a whole engine in a process of Ray's, without a front."""

import socket
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from engine.client import EngineClient, TokenStream
from engine.errors import FORM_LIMITS, EngineDeadError, QueueFullError
from engine.machine import raise_descriptor_limit, use_one_arena
from engine.memory_map import MemoryMap
from engine.monitor import EngineMonitor
from engine.types import FinishReason, Submission, TokenEvent
from server.chat.admission import generates
from server.cli.log import configure_log
from server.cli.model_files import ModelFiles, read_model
from server.cli.serve import STOP_TIMEOUT_S, start_model
from server.config import Config, StartError
from server.http.idle_memory import keep_what_is_there
from server.ray.facts import Facts, check_alike, facts_of
from server.ray.guard import Guard
from server.ray.messages import Numbered, Refusal, ReplicaReport, Route, SentForm
from server.text.grammar.compiler import GrammarCompiler, GrammarMemoryError
from server.text.grammar.grammar_errors import GrammarError
from server.text.grammar.worker import WorkerBusyError

# The front hears from an answer this often, whether there is a token or not.
SIGN_OF_LIFE_S = 1.0


class NotReadyError(Exception):
    """The engine does not generate."""


class EngineReplica:
    """An engine that answers what is sent to it. A method's Route is for the router alone."""

    def __init__(
        self, name: str, client: EngineClient, grammars: GrammarCompiler, ready_timeout_s: float
    ) -> None:
        """name: which no other replica has had. ready_timeout_s: how long a token may take when the
        engine is asked whether it still generates."""
        self._name = name
        self._client = client
        self._grammars = grammars
        self._ready_timeout_s = ready_timeout_s

    async def generate(
        self, _: Route, submission: Submission
    ) -> AsyncGenerator[list[Numbered] | Refusal, None]:
        """Answer a prompt: yield the events of its answers, and an empty list at the beginning and
        whenever a second passes without one. Leaving early aborts it."""
        yield []
        try:
            streams = await self._submit(submission)
        except (QueueFullError, WorkerBusyError, GrammarMemoryError):
            yield Refusal.FULL
            return
        except EngineDeadError:
            yield Refusal.ENDED
            return
        except GrammarError as error:
            # The front has compiled it: this machine took longer, or has less room for it.
            message = f"{FORM_LIMITS}: {error}"
            failed = TokenEvent(0, None, FinishReason.ERROR, message=message)
            yield [(number, failed) for number in range(len(submission.params))]
            return
        running = dict(enumerate(streams))
        try:
            while running:
                batches = await TokenStream.next_batches([*running.values()], SIGN_OF_LIFE_S)
                both = zip(list(running), batches, strict=True)
                events = [(number, event) for number, batch in both for event in batch]
                for number, event in events:
                    if event.finish is not None:
                        del running[number]
                yield events
        finally:
            for stream in streams:
                stream.close()

    async def _submit(self, submission: Submission) -> list[TokenStream]:
        if (sent := submission.constraint) is not None:
            assert isinstance(sent, SentForm)
            constraint = await self._grammars.compile(sent.spec, sent.begun)
            submission = replace(submission, constraint=constraint)
        return self._client.submit_choices(submission)

    async def report(self, _: Route) -> ReplicaReport:
        its = self._client
        figures = its.limits, its.stats, its.capacity, its.step_age_s, its.pressure
        return ReplicaReport(self._name, socket.gethostname(), *figures)

    async def memory_map(self, _: Route) -> MemoryMap:
        return await self._client.memory_map()

    async def check_health(self) -> None:
        """Raise NotReadyError where its engine does not generate a token, ahead of all others."""
        if not (self._client.alive and await generates(self._client, self._ready_timeout_s)):
            raise NotReadyError("the engine does not generate a token in time")


class Replica(EngineReplica):
    """What Ray Serve starts, asks and ends."""

    _guard: Guard | None = None
    _monitor: EngineMonitor | None = None
    _is_attached = False

    def __init__(
        self, model: str, settings: dict[str, Any], head: Facts, name: str | None = None
    ) -> None:
        """model: its name, which may be a folder on every machine. settings: Config as JSON. head:
        what must be the same here. name: Ray's, where there is none. Raises StartError."""
        self._guard = Guard()
        use_one_arena()
        raise_descriptor_limit()
        config = Config.model_validate(settings)
        configure_log(config.log)
        files = _read_alike(model, config, head)
        client, grammars, self._monitor = start_model(config, files, lambda done, total: None)
        keep_what_is_there()
        super().__init__(name or own_name(), client, grammars, config.server.ready_timeout_s)

    async def check_health(self) -> None:
        # Ray asks it first when it is built.
        assert self._guard is not None
        if not self._is_attached:
            self._guard.started()
            self._client.attach()
            self._is_attached = True
        await super().check_health()

    def __del__(self) -> None:
        """End the engine. Ray calls it first."""
        if self._monitor is not None:
            self._client.stop(STOP_TIMEOUT_S)
            self._monitor.stop()
        if self._guard is not None:
            self._guard.end()


def own_name() -> str:
    """Return what Ray calls this replica."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _read_alike(model: str, config: Config, head: Facts) -> ModelFiles:
    """Read a model, and fetch it where it is missing. Raises StartError where it cannot be served
    here, or this machine is not like the head."""
    files = read_model(model, config)
    check_alike(socket.gethostname(), facts_of(files.plan.checkpoint.path), head)
    return files


def why_not_here(model: str, settings: dict[str, Any], head: Facts) -> str:
    """Return why this machine cannot have a replica; nothing where it can."""
    try:
        _read_alike(model, Config.model_validate(settings), head)
    except StartError as error:
        return str(error)
    return ""
