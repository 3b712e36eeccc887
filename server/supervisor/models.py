"""Loads and unloads models within one memory budget::

    not loaded -> loading -> loaded -> ending -> not loaded

A loaded model holds memory for weights, for K and V (cached keys and values) of one sequence of
full length, and for more K and V while the budget has room. To load another model, loaded models
first give up unused K and V, and then the model that was used longest ago is unloaded. Any model
is unloaded after its keep-alive (time without requests).

Models wait for memory in a line, in the order of their first requests. After a turn (the time
``_turn_s``) a waiting model gets the memory of models that have been loaded for a turn. Such a
model refuses new requests, and is unloaded after its last answer.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpcore2
import structlog

from server.config import ModelsSection
from server.protocol.ollama.answer import ModelFacts
from server.protocol.wire_errors import RETRY_AFTER_S
from server.supervisor.process import Headers, LoadError, ModelProcess

# Exit code of a process whose backend for K and V memory failed. A restart uses another backend.
KV_BACKEND_FAILED_CODE = 4
# Pause in seconds between a failed load of a model and the next attempt.
RETRY_LOAD_S = 5.0
# A turn (see the file's docstring) lasts `models.evict_after_idle_s`, but at most this long.
MAX_TURN_S = 300.0
# A model stays in the line for this long after the time at which a client was told to try again.
PLACE_KEPT_S = 10.0
# A model stores at most this many clients' keep-alives. If full, it drops the one that ends first.
MAX_CLIENTS = 64
NOBODY = b""
"""The key in KeepAlive for a loaded model that no client has used yet."""
END_REASONS = ("keep_alive", "room", "failed", "stopped")

log = structlog.get_logger("quire")


class NoRoomError(Exception):
    """Raised if a model cannot be loaded because models that are in use hold the memory."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("other models have the memory, and are in use")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory that a model's process needs."""

    fixed_bytes: int
    """The memory of the process except for K and V."""
    least_kv_bytes: int
    """Memory for K and V of one sequence of full length."""
    most_kv_bytes: int
    """Limit of memory for K and V while no other model is loaded."""
    max_model_len: int
    on_gpu: bool = False
    state_bytes: int = 0
    """The part of ``fixed_bytes`` for states of recurrent layers. cache.kv_budget includes it."""

    @property
    def least_bytes(self) -> int:
        """The least memory with which the model can be loaded."""
        return self.fixed_bytes + self.least_kv_bytes


class ModelSource(Protocol):
    """A model's files, from which its process can start. Sources with equal files are equal."""

    @property
    def name(self) -> str: ...
    @property
    def pinned(self) -> bool: ...

    def needs(self) -> MemoryNeeds:
        """Return the needed memory. Raises LoadError for a model that cannot be served."""

    def facts(self) -> ModelFacts: ...

    def abilities(self) -> tuple[tuple[str, ...], str]:
        """Return capabilities, as Ollama names them, and the chat template. Raises LoadError."""

    async def launch(self, needs: MemoryNeeds, kv_bytes: int) -> ModelProcess:
        """Start the model's process, with at most ``kv_bytes`` for K and V. Raises OSError."""


@dataclass(slots=True)
class KeepAlive:
    """Computes the time until which a model stays loaded: the latest time that any client wants."""

    default_s: float
    _until: dict[bytes, float] = field(default_factory=dict)

    def used(self, client: bytes, now: float, wanted_s: float | None) -> None:
        """Note that a client wants the model for ``wanted_s`` seconds from now. A negative number
        means for ever, None means ``default_s``."""
        keep_s = self.default_s if wanted_s is None else wanted_s
        self._until.pop(NOBODY, None)
        self._until[client] = math.inf if keep_s < 0 else now + keep_s
        if len(self._until) > MAX_CLIENTS:
            others = self._until.keys() - {client}
            del self._until[min(others, key=self._until.__getitem__)]

    @property
    def until(self) -> float:
        """The time until which the model stays loaded, or 0 if no client has used the model."""
        return max(self._until.values(), default=0.0)

    def forget(self) -> None:
        self._until.clear()


@dataclass(slots=True)
class ManagedModel:
    """A model, loaded or not, with its requests and memory."""

    source: ModelSource
    keep: KeepAlive
    needs: MemoryNeeds | None = None
    unfit: LoadError | None = None
    """The error that says why this machine cannot serve the model, or None if it can."""
    read: ModelSource | None = None
    """The source from which ``needs`` and ``unfit`` were read. ``source`` may be newer."""
    process: ModelProcess | None = None
    loading: "asyncio.Task[None] | None" = None
    kv_bytes: int = 0
    """Current limit of memory for K and V."""
    users: int = 0
    """Number of requests that wait for the model or get its answers."""
    last_used: float = -math.inf
    loaded_at: float = -math.inf
    loading_since: float | None = None
    """Time at which the current load was requested, or None if the model is not being loaded."""
    waits_since: float | None = None
    """Time at which the model entered the line for memory, or None if it is not in the line."""
    waits_until: float = -math.inf
    """Time at which the model leaves the line, unless a request for the model comes."""
    yields_to: "ManagedModel | None" = None
    """The waiting model that will get this model's memory."""
    failed: tuple[float, LoadError] | None = None
    """The time and the error of the last load if that load failed, or else None."""
    loads: int = 0
    load_seconds: float = 0.0
    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def pinned(self) -> bool:
        return self.source.pinned

    @property
    def held_bytes(self) -> int:
        if self.process is None or self.needs is None:
            return 0
        return self.needs.fixed_bytes + self.kv_bytes

    @property
    def loaded(self) -> bool:
        """True if the model's process answers requests."""
        return self.process is not None and self.process.alive

    @property
    def at_rest(self) -> bool:
        """True if the model has neither a process nor a request."""
        return self.process is None and self.loading is None and not self.users

    @property
    def idle(self) -> bool:
        """True if the model can be unloaded without harm to a client."""
        return self.loaded and not self.users and self.loading is None and not self.pinned


class ModelSupervisor:
    """Loads and unloads models. All methods run on one event loop."""

    def __init__(
        self,
        settings: ModelsSection,
        budget_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``budget_bytes`` is the memory for all models together. ``clock`` returns seconds."""
        self.budget_bytes = budget_bytes
        self.models: dict[str, ManagedModel] = {}
        self._settings = settings
        self._turn_s = min(settings.evict_after_idle_s, MAX_TURN_S)
        self._clock = clock
        self._turn = asyncio.Lock()
        """This lock is held while memory is taken from models or given to models."""
        self._changed = asyncio.Event()

    def update(self, sources: Iterable[ModelSource]) -> None:
        """Replace ``models`` by the models on the disk. Keep models that are loaded or in use."""
        new = {source.name: source for source in sources}
        for name, model in list(self.models.items()):
            if model.at_rest and name not in new:
                del self.models[name]
            elif model.at_rest and model.source != new[name]:
                model.source, model.failed = new[name], None
        for name, source in new.items():
            if name not in self.models:
                self.models[name] = ManagedModel(source, KeepAlive(self._settings.keep_alive_s))

    @property
    def loaded(self) -> list[ManagedModel]:
        """The loaded models, sorted by the number of requests to each, then by the last use."""
        loaded = [model for model in self.models.values() if model.loaded]
        return sorted(loaded, key=lambda model: (-model.users, -model.last_used))

    @property
    def at_hand(self) -> ManagedModel | None:
        """The model for a request without a model's name: the last used model that is loaded, or
        else the last used model, or else a pinned model, or else the only model."""
        models = list(self.models.values())
        used = [model for model in models if model.last_used > -math.inf or model.pinned]
        former = sorted(used, key=lambda model: (-model.last_used, model.name))
        return next(iter((*self.loaded, *former, *(models if len(models) == 1 else ()))), None)

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - sum(model.held_bytes for model in self.models.values())

    def state_of(self, model: ManagedModel) -> dict[str, Any]:
        """Return whether the model is loaded, and for how long it has been loaded or loading."""
        state: dict[str, Any] = {"loaded": model.loaded, "loaded_s": None, "loading_s": None}
        if model.loading_since is not None:
            state["loading_s"] = round(self._clock() - model.loading_since, 1)
        elif model.loaded:
            state["loaded_s"] = round(self._clock() - model.loaded_at, 1)
        return state

    async def ask_loaded(
        self, target: bytes, headers: Headers
    ) -> list[tuple[ManagedModel, httpcore2.Response | None]]:
        """Send a GET request to the processes of all loaded models. Return each model with the
        answer, or with None if the process does not answer."""
        running = [(model, model.process) for model in self.loaded if model.process is not None]
        answers = await asyncio.gather(*(process.get(target, headers) for _, process in running))
        return [(model, answer) for (model, _), answer in zip(running, answers, strict=True)]

    async def fits(self, model: ManagedModel) -> bool:
        """Return True if the model's least memory is known and is within the budget."""
        with suppress(LoadError):
            return (await self._needs_of(model)).least_bytes <= self.budget_bytes
        return False

    async def _needs_of(self, model: ManagedModel) -> MemoryNeeds:
        """Return the model's needed memory. Compute it only if files changed. Raises LoadError."""
        while model.read is not model.source:
            source, model.unfit = model.source, None
            try:
                model.needs = await asyncio.to_thread(source.needs)
            except LoadError as error:
                model.unfit = error
            model.read = source
        if model.unfit is not None:
            raise model.unfit
        assert model.needs is not None
        return model.needs

    # --- using a model --------------------------------------------------------------------------

    @asynccontextmanager
    async def use(
        self, model: ManagedModel, client: bytes, keep_alive_s: float | None = None
    ) -> AsyncIterator[None]:
        """Count a client's request while the context is open. Then store the keep-alive time."""
        model.users += 1
        try:
            yield
        finally:
            model.users -= 1
            model.last_used = self._clock()
            model.keep.used(client, model.last_used, keep_alive_s)
            self._has_changed()

    def running(self, model: ManagedModel) -> ModelProcess | None:
        """Return a loaded model's process, or None. Raises NoRoomError if it must make room."""
        if not model.loaded:
            return None
        if model.yields_to is not None and self._waits(model.yields_to):
            self._line_up(model)
            raise self._no_room(model)
        return model.process

    async def process_of(self, model: ManagedModel) -> ModelProcess:
        """Load a model if needed, and return its process. Raises LoadError, NoRoomError."""
        if model.failed is not None and self._clock() - model.failed[0] < RETRY_LOAD_S:
            raise model.failed[1]
        while (process := self.running(model)) is None:
            await self.load(model)
        return process

    async def load(self, model: ManagedModel) -> None:
        """Load a model, or wait for a load that has begun. Raises LoadError, NoRoomError."""
        await asyncio.shield(self._start_load(model))

    def _start_load(self, model: ManagedModel) -> "asyncio.Task[None]":
        if model.loading is None:
            self._line_up(model)
            model.loading_since = self._clock()
            model.loading = asyncio.create_task(self._load(model))
            model.loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return model.loading

    async def _load(self, model: ManagedModel) -> None:
        try:
            if model.process is not None:  # the model's earlier process is ending
                await asyncio.shield(model.process.ended)
            process = await self._launched(model)
            began = self._clock()
            await process.ready()
        except LoadError as error:
            model.failed = self._clock(), error
            self._leave_line(model)
            log.error(f"{model.name} was not loaded: {error}")
            raise
        finally:
            model.loading = model.loading_since = None
        model.failed = None
        model.loads += 1
        model.loaded_at = self._clock()
        seconds = model.loaded_at - began
        model.load_seconds += seconds
        model.keep.used(NOBODY, self._clock(), None)
        log.info(f"{model.name} is loaded", seconds=round(seconds, 2))
        await self._share_out()

    async def _launched(self, model: ManagedModel) -> ModelProcess:
        """Wait for memory, and start the model's process. Raises LoadError, NoRoomError."""
        while True:
            async with self._turn:
                needs = await self._needs_of(model)
                if await self._make_room(model, needs):
                    return await self._launch(model, needs)
                changed = self._changed
            await changed.wait()
            if not model.users:
                raise self._no_room(model)

    async def _launch(self, model: ManagedModel, needs: MemoryNeeds) -> ModelProcess:
        """Start the model's process, with all free memory for K and V. Raises LoadError."""
        kv_bytes = min(self.free_bytes - needs.fixed_bytes, needs.most_kv_bytes)
        log.info(f"loading {model.name}")
        try:
            process = await model.source.launch(needs, kv_bytes)
        except OSError as error:
            raise LoadError(f"its process could not be started: {error.strerror}") from error
        model.process, model.kv_bytes = process, kv_bytes
        self._leave_line(model)
        process.ended.add_done_callback(lambda _: self._has_ended(model, process))
        return process

    def kept_for_s(self, model: ManagedModel) -> float | None:
        """Return the seconds that a loaded model stays without a request. None means for ever."""
        if model.pinned or model.keep.until == math.inf:
            return None
        return max(0.0, model.keep.until - self._clock())

    # --- making room for a model ----------------------------------------------------------------

    async def _make_room(self, model: ManagedModel, needs: MemoryNeeds) -> bool:
        """Free memory. Return False if answers must end first. Raises LoadError, NoRoomError."""
        if needs.least_bytes > self.budget_bytes:
            raise LoadError(
                f"it needs {needs.least_bytes} bytes, and all models together may have "
                f"{self.budget_bytes}: lower --max-model-len, or take a smaller model"
            )
        wanted = needs.least_bytes + self._kept_bytes(model)
        for other in self._others(model):
            missing = wanted - self.free_bytes
            if missing > 0:
                assert other.needs is not None
                least = other.needs.least_kv_bytes
                await self._limit(other, max(least, other.kv_bytes - missing))
        # The models to unload are chosen again after each unload: a chosen model may be in use now.
        while (missing := wanted - self.free_bytes) > 0:
            victims = self._victims(model, missing)
            if any(victim.users for victim in victims):
                for victim in victims:
                    victim.yields_to = model
                return False
            await self._unload(victims[0], "room", f"{model.name} needs its memory")
        return True

    def _others(self, model: ManagedModel) -> list[ManagedModel]:
        """Return the other loaded models: idle before busy ones, and the longest unused first."""
        return [other for other in reversed(self.loaded) if other is not model]

    def _victims(self, model: ManagedModel, missing: int) -> list[ManagedModel]:
        """Return the models to unload so that ``missing`` bytes become free. Raises NoRoomError."""
        victims: list[ManagedModel] = []
        for other in self._others(model):
            if missing > 0 and self._goes_at(other, model) <= self._clock():
                victims.append(other)
                missing -= other.held_bytes
        if missing > 0:
            raise self._no_room(model)
        return victims

    def _goes_at(self, model: ManagedModel, other: ManagedModel) -> float:
        """Return the time at which ``model`` may be unloaded for ``other``: ``_turn_s`` after both
        the load of ``model`` and the start of ``other``'s wait, or sooner if idle long enough."""
        if model.pinned or model.loading is not None:
            return math.inf
        assert other.waits_since is not None
        turn_over = max(model.loaded_at, other.waits_since) + self._turn_s
        idle_at = model.last_used + self._settings.evict_after_idle_s
        return turn_over if model.users else min(turn_over, idle_at)

    # --- the line of models that wait for memory ------------------------------------------------

    def _line_up(self, model: ManagedModel) -> None:
        """Put a model at the end of the line, unless the model is in the line."""
        if not self._waits(model):
            self._leave_line(model)
            model.waits_since = self._clock()

    def _leave_line(self, model: ManagedModel) -> None:
        model.waits_since = None
        for other in self.models.values():
            if other.yields_to is model:
                other.yields_to = None

    def _kept_bytes(self, model: ManagedModel) -> int:
        """Return the bytes to keep for models ahead of ``model`` that have waited a whole turn."""
        assert model.waits_since is not None
        latest = self._clock() - self._turn_s
        return sum(
            other.needs.least_bytes
            for other in self.models.values()
            if other.needs is not None and other.waits_since is not None and self._waits(other)
            if other.waits_since < model.waits_since and other.waits_since <= latest
        )

    def _waits(self, model: ManagedModel) -> bool:
        """Return True if the model is in the line, and a client waits or may still return."""
        is_wanted = model.loading is not None or self._clock() <= model.waits_until
        return model.waits_since is not None and is_wanted

    def _no_room(self, model: ManagedModel) -> NoRoomError:
        """Return an error that says when a client may retry. The model stays in the line."""
        now = self._clock()
        room_at = min((self._goes_at(each, model) for each in self._others(model)), default=now)
        wait_s = 0.0 if room_at == math.inf else room_at - now
        error = NoRoomError(max(RETRY_AFTER_S, math.ceil(wait_s)))
        model.waits_until = now + error.retry_after_s + PLACE_KEPT_S
        return error

    async def _limit(self, model: ManagedModel, kv_bytes: int) -> None:
        """Limit a model's K and V to ``kv_bytes``, or to the bytes in use if these are more."""
        if model.process is None or kv_bytes == model.kv_bytes:
            return
        # Count a raised limit before the process sets it, but a lowered limit only afterwards.
        before, model.kv_bytes = model.kv_bytes, max(model.kv_bytes, kv_bytes)
        limit = await model.process.set_kv_limit(kv_bytes)
        model.kv_bytes = before if limit is None else min(limit, model.kv_bytes)

    async def _share_out(self) -> None:
        """Give all free memory to loaded models for K and V, beginning with models in use."""
        async with self._turn:
            for model in self.loaded:
                assert model.needs is not None
                more = min(self.free_bytes, model.needs.most_kv_bytes - model.kv_bytes)
                if more > 0:
                    await self._limit(model, model.kv_bytes + more)

    # --- unloading a model ----------------------------------------------------------------------

    async def stop_model(self, model: ManagedModel) -> bool:
        """Unload a model and return True. Return False if the model is in use."""
        async with self._turn:
            if model.users or model.loading is not None:
                return False
            if model.loaded:
                await self._unload(model, "stopped", "as asked")
            return True

    async def _unload(self, model: ManagedModel, reason: str, why: str) -> None:
        process = model.process
        assert process is not None
        assert not model.users
        log.info(f"unloading {model.name}: {why}")
        model.ends[reason] += 1
        await process.stop()
        self._has_ended(model, process)

    def _has_ended(self, model: ManagedModel, process: ModelProcess) -> None:
        """Free the memory of an ended process. A second call does nothing."""
        if model.process is not process:
            return
        model.process, model.kv_bytes = None, 0
        model.keep.forget()
        self._has_changed()
        if process.ending:
            return
        model.ends["failed"] += 1
        code = process.ended.result()
        log.error(f"the process of {model.name} has ended by itself (exit code {code})")
        if code == KV_BACKEND_FAILED_CODE and process.was_ready:
            self._start_load(model)

    async def keep_time(self) -> None:
        """Unload models after their keep-alive, and share out their memory. Never returns."""
        while True:
            changed = self._changed
            async with self._turn:
                for model in list(self.models.values()):
                    if model.idle and model.keep.until <= self._clock():
                        why = "nobody has used it for its keep_alive"
                        await self._unload(model, "keep_alive", why)
            await self._share_out()
            ends = (model.keep.until for model in self.models.values() if model.idle)
            wait_s = min(ends, default=math.inf) - self._clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if wait_s == math.inf else max(0.0, wait_s)):
                    await changed.wait()

    def _has_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def end_answers(self) -> None:
        """Make all processes end their answers with an error, and exit."""
        for model in self.models.values():
            if model.process is not None:
                model.process.tell_to_stop()

    async def close(self) -> None:
        tasks = [model.loading for model in self.models.values() if model.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        processes = [each.process for each in self.models.values() if each.process is not None]
        await asyncio.gather(*(process.stop() for process in processes))
