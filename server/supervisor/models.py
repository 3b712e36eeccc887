"""Load and unload models within one budget of memory.

::

    not loaded -> loading -> loaded -> ending -> not loaded

A loaded model has its weights, K and V for one sequence of the longest length, and more K and V
while there is room. For a model that is to be loaded, others first give unused K and V; then the
one that was used longest ago ends. A model also ends when no client wants to keep it any more.

Models wait for memory in a line, in the order of their first requests. A model that has waited for
its turn gets the memory of models in use that have had theirs: these take no more requests, and
end with their last answer. The line, the memory and the processes share one state, hence one file.
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

# The exit code where a GPU's memory of K and V failed: the next start takes another backend.
SUBSTRATE_FAILED_CODE = 4
# The time between a load that failed and the next attempt.
RETRY_LOAD_S = 5.0
# How long a model in use keeps others waiting, unless `models.evict_after_idle_s` is shorter.
MAX_TURN_S = 300.0
# A model keeps its place in the line for this time after the `Retry-After` of its last request.
PLACE_KEPT_S = 10.0
# Clients that are remembered of one model; of more, those that want it for longest.
MAX_CLIENTS = 64
NOBODY = b""
"""The client of a model that no client has used yet."""
END_REASONS = ("keep_alive", "room", "failed", "stopped")

log = structlog.get_logger("quire")


class NoRoomError(Exception):
    """Other models have all memory, and are in use."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("other models have the memory, and are in use")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory of a model."""

    fixed_bytes: int
    """All memory but K and V."""
    least_kv_bytes: int
    """K and V of one sequence of the longest length."""
    most_kv_bytes: int
    """K and V of a model that is alone."""
    max_model_len: int
    on_gpu: bool = False
    state_bytes: int = 0
    """The part of ``fixed_bytes`` for states of recurrent layers: the process takes it off its
    budget of K and V."""

    @property
    def least_bytes(self) -> int:
        """Return the memory without which the model is not loaded."""
        return self.fixed_bytes + self.least_kv_bytes


@dataclass(frozen=True, slots=True)
class Abilities:
    """A model's capabilities in Ollama's words, and its chat template."""

    capabilities: tuple[str, ...]
    template: str


class ModelSource(Protocol):
    """A model's files, and the command of its process. Sources are equal where the files are."""

    @property
    def name(self) -> str: ...
    @property
    def created(self) -> int:
        """When the files were written; Unix seconds."""

    @property
    def pinned(self) -> bool: ...

    def needs(self) -> MemoryNeeds:
        """Raises LoadError for a model that cannot be served here; then the rest is not called."""

    def facts(self) -> ModelFacts: ...

    def abilities(self) -> Abilities:
        """Raises LoadError."""

    async def launch(self, needs: MemoryNeeds, kv_bytes: int) -> ModelProcess:
        """Start the process. kv_bytes: its first limit of K and V. Raises OSError."""


@dataclass(slots=True)
class KeepAlive:
    """The time until which a model is kept: the latest that one of its clients wants."""

    default_s: float
    _until: dict[bytes, float] = field(default_factory=dict)

    def used(self, client: bytes, now: float, wanted_s: float | None) -> None:
        """Note that a client's request has ended. wanted_s: how long to keep the model after it;
        negative means for ever, None the default."""
        keep_s = self.default_s if wanted_s is None else wanted_s
        self._until.pop(NOBODY, None)
        self._until[client] = math.inf if keep_s < 0 else now + keep_s
        if len(self._until) > MAX_CLIENTS:
            others = self._until.keys() - {client}
            del self._until[min(others, key=self._until.__getitem__)]

    @property
    def until(self) -> float:
        """Return 0 for a model that has not been used."""
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
    """Why it cannot be served here."""
    read: ModelSource | None = None
    """The source of ``needs``: the files may have been replaced since."""
    process: ModelProcess | None = None
    loading: "asyncio.Task[None] | None" = None
    kv_bytes: int = 0
    """The limit of K and V."""
    users: int = 0
    """Requests that wait for it or are answered by it."""
    last_used: float = -math.inf
    loaded_at: float = -math.inf
    waits_since: float | None = None
    """When it got its place in the line for memory; None without a place."""
    waits_until: float = -math.inf
    """When it loses the place, unless a request asks for it meanwhile."""
    yields_to: "ManagedModel | None" = None
    """The model that gets its memory, as long as that one waits."""
    failed: tuple[float, LoadError] | None = None
    """The time of the last load that failed, and the reason."""
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
        """Return its part of the budget."""
        if self.process is None or self.needs is None:
            return 0
        return self.needs.fixed_bytes + self.kv_bytes

    @property
    def loaded(self) -> bool:
        """Return whether it answers requests."""
        return self.process is not None and self.process.alive

    @property
    def at_rest(self) -> bool:
        """Return whether it has no process, and no request wants one."""
        return self.process is None and self.loading is None and not self.users

    @property
    def idle(self) -> bool:
        """Return whether it may be unloaded without a loss for a client."""
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
        """budget_bytes: of all models together."""
        self.budget_bytes = budget_bytes
        self.models: dict[str, ManagedModel] = {}
        self._settings = settings
        self._turn_s = min(settings.evict_after_idle_s, MAX_TURN_S)
        self._clock = clock
        self._turn = asyncio.Lock()
        """Held while memory is shared out."""
        self._changed = asyncio.Event()

    def update(self, sources: Iterable[ModelSource]) -> None:
        """Replace the models by those of the disk. A model that is loaded or used stays."""
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
        """Return the loaded models, the last used one first."""
        loaded = [model for model in self.models.values() if model.loaded]
        return sorted(loaded, key=lambda model: (-model.users, -model.last_used))

    @property
    def at_hand(self) -> ManagedModel | None:
        """Return the model for a client without a name: the last used one of the loaded models, or
        of all; else a pinned one, or the only one."""
        models = list(self.models.values())
        used = [model for model in models if model.last_used > -math.inf or model.pinned]
        former = sorted(used, key=lambda model: (-model.last_used, model.name))
        return next(iter((*self.loaded, *former, *(models if len(models) == 1 else ()))), None)

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - sum(model.held_bytes for model in self.models.values())

    async def fits(self, model: ManagedModel) -> bool:
        """Return whether a model can be served within the budget; read its needs."""
        with suppress(LoadError):
            return (await self._needs_of(model)).least_bytes <= self.budget_bytes
        return False

    async def _needs_of(self, model: ManagedModel) -> MemoryNeeds:
        """Read a model's needs, once for each source. Raises LoadError."""
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
        """Keep the model loaded for a client's request. keep_alive_s: how long it should stay
        afterwards; negative: for ever."""
        model.users += 1
        try:
            yield
        finally:
            model.users -= 1
            model.last_used = self._clock()
            model.keep.used(client, model.last_used, keep_alive_s)
            self._has_changed()

    def running(self, model: ManagedModel) -> ModelProcess | None:
        """Return the process of a loaded model; None for others. Raises NoRoomError where another
        model is to get its memory."""
        if not model.loaded:
            return None
        if model.yields_to is not None and self._waits(model.yields_to):
            self._line_up(model)
            raise self._no_room(model)
        return model.process

    async def process_of(self, model: ManagedModel) -> ModelProcess:
        """Return the process of a model in use; load it where it is not. Raises LoadError,
        NoRoomError."""
        if model.failed is not None and self._clock() - model.failed[0] < RETRY_LOAD_S:
            raise model.failed[1]
        while (process := self.running(model)) is None:
            await self.load(model)
        return process

    async def load(self, model: ManagedModel) -> None:
        """Load a model, or wait for a load that runs. Raises LoadError, NoRoomError."""
        await asyncio.shield(self._start_load(model))

    def _start_load(self, model: ManagedModel) -> "asyncio.Task[None]":
        if model.loading is None:
            self._line_up(model)
            model.loading = asyncio.create_task(self._load(model))
            model.loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        return model.loading

    async def _load(self, model: ManagedModel) -> None:
        try:
            if model.process is not None:  # the former one is ending
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
        """Start the model's process, with its part of the memory."""
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
        """Start the model's process with the free memory. Raises LoadError."""
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
        """Return for how many seconds a loaded model stays without a request; None for ever."""
        if model.pinned or model.keep.until == math.inf:
            return None
        return max(0.0, model.keep.until - self._clock())

    # --- memory ---------------------------------------------------------------------------------

    async def _make_room(self, model: ManagedModel, needs: MemoryNeeds) -> bool:
        """Free the memory that a model needs. Return False where running answers have to end first.
        Raises LoadError, NoRoomError."""
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
        # A request may come for a model while another one ends: each turn chooses again.
        while (missing := wanted - self.free_bytes) > 0:
            victims = self._victims(model, missing)
            if any(victim.users for victim in victims):
                for victim in victims:
                    victim.yields_to = model
                return False
            await self._unload(victims[0], "room", f"{model.name} needs its memory")
        return True

    def _others(self, model: ManagedModel) -> list[ManagedModel]:
        """Return the other loaded models, the one that was used longest ago first."""
        return [other for other in reversed(self.loaded) if other is not model]

    def _victims(self, model: ManagedModel, missing: int) -> list[ManagedModel]:
        """Return the models that have to go for a model. missing: bytes that they have to free.
        Raises NoRoomError."""
        victims: list[ManagedModel] = []
        for other in self._others(model):
            if missing > 0 and self._goes_at(other, model) <= self._clock():
                victims.append(other)
                missing -= other.held_bytes
        if missing > 0:
            raise self._no_room(model)
        return victims

    def _goes_at(self, model: ManagedModel, other: ManagedModel) -> float:
        """Return the time at which a model may go for another one that waits: it has been idle for
        long enough, or it has stayed and the other has waited for a turn."""
        if model.pinned or model.loading is not None:
            return math.inf
        assert other.waits_since is not None
        turn_over = max(model.loaded_at, other.waits_since) + self._turn_s
        idle_at = model.last_used + self._settings.evict_after_idle_s
        return turn_over if model.users else min(turn_over, idle_at)

    # --- the line for memory --------------------------------------------------------------------

    def _line_up(self, model: ManagedModel) -> None:
        """Give a model a place in the line, unless it has one."""
        if not self._waits(model):
            self._leave_line(model)
            model.waits_since = self._clock()

    def _leave_line(self, model: ManagedModel) -> None:
        model.waits_since = None
        for other in self.models.values():
            if other.yields_to is model:
                other.yields_to = None

    def _kept_bytes(self, model: ManagedModel) -> int:
        """Return the bytes for the models before a model in the line that have waited for a
        turn."""
        assert model.waits_since is not None
        latest = self._clock() - self._turn_s
        return sum(
            other.needs.least_bytes
            for other in self.models.values()
            if other.needs is not None and other.waits_since is not None and self._waits(other)
            if other.waits_since < model.waits_since and other.waits_since <= latest
        )

    def _waits(self, model: ManagedModel) -> bool:
        """Return whether a model has a valid place in the line."""
        is_wanted = model.loading is not None or self._clock() <= model.waits_until
        return model.waits_since is not None and is_wanted

    def _no_room(self, model: ManagedModel) -> NoRoomError:
        """Make the error that says when to try again. The model keeps its place in the line."""
        now = self._clock()
        room_at = min((self._goes_at(each, model) for each in self._others(model)), default=now)
        wait_s = 0.0 if room_at == math.inf else room_at - now
        error = NoRoomError(max(RETRY_AFTER_S, math.ceil(wait_s)))
        model.waits_until = now + error.retry_after_s + PLACE_KEPT_S
        return error

    async def _limit(self, model: ManagedModel, kv_bytes: int) -> None:
        """Set a model's limit of K and V, or as close to it as its use allows."""
        if model.process is None or kv_bytes == model.kv_bytes:
            return
        # More is counted before it may be used, less once it is not.
        before, model.kv_bytes = model.kv_bytes, max(model.kv_bytes, kv_bytes)
        limit = await model.process.set_kv_limit(kv_bytes)
        model.kv_bytes = before if limit is None else min(limit, model.kv_bytes)

    async def _share_out(self) -> None:
        """Give free memory to the loaded models, the last used one first."""
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
        """Take back the memory of a process that has ended. Idempotent."""
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
        """Unload models at the end of their keep_alive; share out freed memory. Never returns."""
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
        """Have all processes end their answers with an error, and exit."""
        for model in self.models.values():
            if model.process is not None:
                model.process.tell_to_stop()

    async def close(self) -> None:
        """End all processes."""
        tasks = [model.loading for model in self.models.values() if model.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        processes = [each.process for each in self.models.values() if each.process is not None]
        await asyncio.gather(*(process.stop() for process in processes))
