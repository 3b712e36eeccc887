"""Loads and unloads models within one memory budget.

::

    not loaded -> loading -> loaded -> ending -> not loaded

A loaded model holds its weights, K and V for one sequence of full length, and more K and V while
there is room. To make room for another model, loaded ones first give up unused K and V; then the
model that was used longest ago is unloaded. A model is also unloaded when its keep-alive is over.

Models wait for memory in a line, in the order of their first requests. After a turn of waiting, a
model takes the memory of models in use that have had a turn themselves: these refuse new requests
and are unloaded after their last answer. All of this shares one state, hence one file.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from server.config import ModelsSection
from server.protocol.ollama.answer import ModelFacts
from server.protocol.wire_errors import RETRY_AFTER_S
from server.supervisor.process import LoadError, ModelProcess

# Exit code after the GPU's memory of K and V failed: a restarted process chooses another substrate.
SUBSTRATE_FAILED_CODE = 4
# Pause between a failed load and the next attempt.
RETRY_LOAD_S = 5.0
# Longest turn of a model in use; a shorter `models.evict_after_idle_s` replaces it.
MAX_TURN_S = 300.0
# A model keeps its place in the line until so long after the `Retry-After` of its last request.
PLACE_KEPT_S = 10.0
# Clients to remember per model; beyond, the one with the earliest end of its keep-alive goes.
MAX_CLIENTS = 64
NOBODY = b""
"""Stands for the client of a loaded model that is still unused."""
END_REASONS = ("keep_alive", "room", "failed", "stopped")

log = structlog.get_logger("quire")


class NoRoomError(Exception):
    """Other models hold all memory and are in use."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("other models have the memory, and are in use")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory that a model needs."""

    fixed_bytes: int
    """All memory except K and V."""
    least_kv_bytes: int
    """K and V of one sequence of full length."""
    most_kv_bytes: int
    """Limit of K and V for a model that is alone."""
    max_model_len: int
    on_gpu: bool = False
    state_bytes: int = 0
    """Part of ``fixed_bytes`` for recurrent layers; included in a process's budget of K and V."""

    @property
    def least_bytes(self) -> int:
        """Return the least memory to load the model."""
        return self.fixed_bytes + self.least_kv_bytes


@dataclass(frozen=True, slots=True)
class Abilities:
    """A model's capabilities in Ollama's terms, and its chat template."""

    capabilities: tuple[str, ...]
    template: str


class ModelSource(Protocol):
    """A model's files and the start of its process. Sources with equal files are equal."""

    @property
    def name(self) -> str: ...
    @property
    def created(self) -> int:
        """Time of the files in Unix seconds."""

    @property
    def pinned(self) -> bool: ...

    def needs(self) -> MemoryNeeds:
        """Raises LoadError for a model that cannot be served; then no other method is called."""

    def facts(self) -> ModelFacts: ...

    def abilities(self) -> Abilities:
        """Raises LoadError."""

    async def launch(self, needs: MemoryNeeds, kv_bytes: int) -> ModelProcess:
        """Start the process. kv_bytes: first limit of K and V. Raises OSError."""


@dataclass(slots=True)
class KeepAlive:
    """The end of a model's keep-alive: the latest that any client wants."""

    default_s: float
    _until: dict[bytes, float] = field(default_factory=dict)

    def used(self, client: bytes, now: float, wanted_s: float | None) -> None:
        """Note the end of a request. wanted_s: keep-alive; negative: for ever; None: default."""
        keep_s = self.default_s if wanted_s is None else wanted_s
        self._until.pop(NOBODY, None)
        self._until[client] = math.inf if keep_s < 0 else now + keep_s
        if len(self._until) > MAX_CLIENTS:
            others = self._until.keys() - {client}
            del self._until[min(others, key=self._until.__getitem__)]

    @property
    def until(self) -> float:
        """End of the keep-alive; 0 for an unused model."""
        return max(self._until.values(), default=0.0)

    def forget(self) -> None:
        self._until.clear()


@dataclass(slots=True)
class ManagedModel:
    """A model, loaded or not."""

    source: ModelSource
    keep: KeepAlive
    needs: MemoryNeeds | None = None
    unfit: LoadError | None = None
    """Why the model cannot be served here."""
    read: ModelSource | None = None
    """The source that ``needs`` and ``unfit`` belong to; ``source`` may be newer."""
    process: ModelProcess | None = None
    loading: "asyncio.Task[None] | None" = None
    kv_bytes: int = 0
    """Current limit of K and V."""
    users: int = 0
    """Requests that wait for the model or get its answers."""
    last_used: float = -math.inf
    loaded_at: float = -math.inf
    waits_since: float | None = None
    """Time since which the model has a place in the line for memory; None without a place."""
    waits_until: float = -math.inf
    """Time at which the place is lost if no request comes for the model."""
    yields_to: "ManagedModel | None" = None
    """The waiting model that will get this one's memory."""
    failed: tuple[float, LoadError] | None = None
    """Time and error of the last failed load."""
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
        """Return the model's part of the budget."""
        if self.process is None or self.needs is None:
            return 0
        return self.needs.fixed_bytes + self.kv_bytes

    @property
    def loaded(self) -> bool:
        """Return whether the model answers requests."""
        return self.process is not None and self.process.alive

    @property
    def at_rest(self) -> bool:
        """Return whether the model has no process and no request."""
        return self.process is None and self.loading is None and not self.users

    @property
    def idle(self) -> bool:
        """Return whether the model can be unloaded without harm to a client."""
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
        """budget_bytes: memory for all models together."""
        self.budget_bytes = budget_bytes
        self.models: dict[str, ManagedModel] = {}
        self._settings = settings
        self._turn_s = min(settings.evict_after_idle_s, MAX_TURN_S)
        self._clock = clock
        self._turn = asyncio.Lock()
        """Held while memory is distributed."""
        self._changed = asyncio.Event()

    def update(self, sources: Iterable[ModelSource]) -> None:
        """Replace the models by those on the disk. Loaded and used models stay."""
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
        """Return the loaded models, the last used first."""
        loaded = [model for model in self.models.values() if model.loaded]
        return sorted(loaded, key=lambda model: (-model.users, -model.last_used))

    @property
    def at_hand(self) -> ManagedModel | None:
        """Return the model for a request without a name: the last used one among the loaded, or
        else among all; else a pinned one, or the only one."""
        models = list(self.models.values())
        used = [model for model in models if model.last_used > -math.inf or model.pinned]
        former = sorted(used, key=lambda model: (-model.last_used, model.name))
        return next(iter((*self.loaded, *former, *(models if len(models) == 1 else ()))), None)

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - sum(model.held_bytes for model in self.models.values())

    async def fits(self, model: ManagedModel) -> bool:
        """Return whether the model's needs are known and within the budget."""
        with suppress(LoadError):
            return (await self._needs_of(model)).least_bytes <= self.budget_bytes
        return False

    async def _needs_of(self, model: ManagedModel) -> MemoryNeeds:
        """Read the model's needs, once per source. Raises LoadError."""
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

    # --- using ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(
        self, model: ManagedModel, client: bytes, keep_alive_s: float | None = None
    ) -> AsyncIterator[None]:
        """Mark the model as used by a client. keep_alive_s: time to stay; negative: for ever."""
        model.users += 1
        try:
            yield
        finally:
            model.users -= 1
            model.last_used = self._clock()
            model.keep.used(client, model.last_used, keep_alive_s)
            self._has_changed()

    def running(self, model: ManagedModel) -> ModelProcess | None:
        """Return a loaded model's process, if any. Raises NoRoomError if the model must go."""
        if not model.loaded:
            return None
        if model.yields_to is not None and self._waits(model.yields_to):
            self._line_up(model)
            raise self._no_room(model)
        return model.process

    async def process_of(self, model: ManagedModel) -> ModelProcess:
        """Return a used model's process, loaded if needed. Raises LoadError, NoRoomError."""
        if model.failed is not None and self._clock() - model.failed[0] < RETRY_LOAD_S:
            raise model.failed[1]
        while (process := self.running(model)) is None:
            await self.load(model)
        return process

    async def load(self, model: ManagedModel) -> None:
        """Load a model, or join a running load. Raises LoadError, NoRoomError."""
        await asyncio.shield(self._start_load(model))

    def _start_load(self, model: ManagedModel) -> "asyncio.Task[None]":
        if model.loading is None:
            self._line_up(model)
            model.loading = asyncio.create_task(self._load(model))
            model.loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return model.loading

    async def _load(self, model: ManagedModel) -> None:
        try:
            if model.process is not None:  # the previous process is ending
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
            model.loading = None
        model.failed = None
        model.loads += 1
        model.loaded_at = self._clock()
        seconds = model.loaded_at - began
        model.load_seconds += seconds
        model.keep.used(NOBODY, self._clock(), None)
        log.info(f"{model.name} is loaded", seconds=round(seconds, 2))
        await self._share_out()

    async def _launched(self, model: ManagedModel) -> ModelProcess:
        """Wait for memory, then start the model's process. Raises LoadError, NoRoomError."""
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
        """Start the model's process in the free memory. Raises LoadError."""
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
        """Return the seconds that a loaded model stays without a request; None: for ever."""
        if model.pinned or model.keep.until == math.inf:
            return None
        return max(0.0, model.keep.until - self._clock())

    # --- memory ---------------------------------------------------------------------------------

    async def _make_room(self, model: ManagedModel, needs: MemoryNeeds) -> bool:
        """Free memory for a model; False: answers must end first. Raises LoadError, NoRoomError."""
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
        # Choose again after each unload: a request may have come for a victim meanwhile.
        while (missing := wanted - self.free_bytes) > 0:
            victims = self._victims(model, missing)
            if any(victim.users for victim in victims):
                for victim in victims:
                    victim.yields_to = model
                return False
            await self._unload(victims[0], "room", f"{model.name} needs its memory")
        return True

    def _others(self, model: ManagedModel) -> list[ManagedModel]:
        """Return the other loaded models, the longest unused first."""
        return [other for other in reversed(self.loaded) if other is not model]

    def _victims(self, model: ManagedModel, missing: int) -> list[ManagedModel]:
        """Return the models to unload for a model. missing: bytes to free. Raises NoRoomError."""
        victims: list[ManagedModel] = []
        for other in self._others(model):
            if missing > 0 and self._goes_at(other, model) <= self._clock():
                victims.append(other)
                missing -= other.held_bytes
        if missing > 0:
            raise self._no_room(model)
        return victims

    def _goes_at(self, model: ManagedModel, other: ManagedModel) -> float:
        """Return the time at which a model may be unloaded for a waiting one: after enough
        idleness, or when both the model's stay and the other's wait have lasted a turn."""
        if model.pinned or model.loading is not None:
            return math.inf
        assert other.waits_since is not None
        turn_over = max(model.loaded_at, other.waits_since) + self._turn_s
        idle_at = model.last_used + self._settings.evict_after_idle_s
        return turn_over if model.users else min(turn_over, idle_at)

    # --- the line for memory --------------------------------------------------------------------

    def _line_up(self, model: ManagedModel) -> None:
        """Give a model a place in the line if it has none."""
        if not self._waits(model):
            self._leave_line(model)
            model.waits_since = self._clock()

    def _leave_line(self, model: ManagedModel) -> None:
        model.waits_since = None
        for other in self.models.values():
            if other.yields_to is model:
                other.yields_to = None

    def _kept_bytes(self, model: ManagedModel) -> int:
        """Return the bytes for models earlier in the line that have waited for a turn."""
        assert model.waits_since is not None
        latest = self._clock() - self._turn_s
        return sum(
            other.needs.least_bytes
            for other in self.models.values()
            if other.needs is not None and other.waits_since is not None and self._waits(other)
            if other.waits_since < model.waits_since and other.waits_since <= latest
        )

    def _waits(self, model: ManagedModel) -> bool:
        """Return whether the model has a valid place in the line."""
        is_wanted = model.loading is not None or self._clock() <= model.waits_until
        return model.waits_since is not None and is_wanted

    def _no_room(self, model: ManagedModel) -> NoRoomError:
        """Return an error that says when to try again. The model keeps its place in the line."""
        now = self._clock()
        room_at = min((self._goes_at(each, model) for each in self._others(model)), default=now)
        wait_s = 0.0 if room_at == math.inf else room_at - now
        error = NoRoomError(max(RETRY_AFTER_S, math.ceil(wait_s)))
        model.waits_until = now + error.retry_after_s + PLACE_KEPT_S
        return error

    async def _limit(self, model: ManagedModel, kv_bytes: int) -> None:
        """Set a model's limit of K and V, or the nearest limit that its use allows."""
        if model.process is None or kv_bytes == model.kv_bytes:
            return
        # Count a higher limit before setting it, a lower one only after the process confirms.
        before, model.kv_bytes = model.kv_bytes, max(model.kv_bytes, kv_bytes)
        limit = await model.process.set_kv_limit(kv_bytes)
        model.kv_bytes = before if limit is None else min(limit, model.kv_bytes)

    async def _share_out(self) -> None:
        """Give free memory to the loaded models, the last used first."""
        async with self._turn:
            for model in self.loaded:
                assert model.needs is not None
                more = min(self.free_bytes, model.needs.most_kv_bytes - model.kv_bytes)
                if more > 0:
                    await self._limit(model, model.kv_bytes + more)

    # --- ending ---------------------------------------------------------------------------------

    async def stop_model(self, model: ManagedModel) -> bool:
        """Unload a model; return False for a model in use."""
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
        """Take back the memory of an ended process. Further calls do nothing."""
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
        if code == SUBSTRATE_FAILED_CODE and process.was_ready:
            self._start_load(model)

    async def keep_time(self) -> None:
        """Unload models after their keep-alive; distribute freed memory. Never returns."""
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
        """Tell all processes to end their answers with an error, and to exit."""
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
