"""The models that are served: which are loaded, who uses them, and who has how much memory.

::

    not loaded -> loading -> loaded -> ending -> not loaded

One budget of memory is over all. A model is given what it needs besides K and V, and K and V for
one sequence of the longest length; more K and V while there is room. For a model that is to be
loaded, others first give the K and V that they do not use; then the one that was used longest ago
ends. It also ends when no client wants it to be kept any more.

Models wait for memory in a line, in the order in which they were asked for. One that has waited
for its turn gets the memory of others that are in use and have had theirs: these take no more
requests, and end with their last answer.
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
from server.supervisor.errors import LoadError, NoRoomError
from server.supervisor.keep_alive import NOBODY, KeepAlive
from server.supervisor.process import ModelProcess

# How a process ends whose memory of K and V failed: started again, it takes another substrate.
SUBSTRATE_FAILED_CODE = 4
# A model that did not load is not tried again for so long.
RETRY_LOAD_S = 5.0
# How long a model in use may keep others waiting, if `models.evict_after_idle_s` is not less.
MAX_TURN_S = 300.0
# How long a model keeps its place in the line when it is time to ask for it again.
PLACE_KEPT_S = 10.0
END_REASONS = ("keep_alive", "room", "failed", "stopped")

log = structlog.get_logger("quire")


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What a model takes. Bytes."""

    fixed_bytes: int
    """All but K and V."""
    least_kv_bytes: int
    """K and V of one sequence of the longest length."""
    most_kv_bytes: int
    """What it would be given if it were alone."""
    max_model_len: int
    on_gpu: bool = False
    """Whether it is memory of a GPU."""
    state_bytes: int = 0
    """Of ``fixed_bytes``, states of recurrent layers: its process takes them off the budget of K
    and V."""

    @property
    def least_bytes(self) -> int:
        """Return without how much it is not loaded."""
        return self.fixed_bytes + self.least_kv_bytes


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a model can do, in Ollama's words, and the template of its conversations."""

    capabilities: tuple[str, ...]
    template: str


class ModelSource(Protocol):
    """A model's files, and how its process is started. Two are equal where the files are."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def created(self) -> int:
        """When its files were written; Unix seconds."""

    @property
    def pinned(self) -> bool:
        """Whether it stays, once it is loaded."""

    def needs(self) -> MemoryNeeds:
        """Read what it takes. Raises LoadError for a model that cannot be served here."""

    def facts(self) -> ModelFacts:
        """Read what its files say of it. Only of a model that can be served."""

    def abilities(self) -> Abilities:
        """Read what it can do. Only of a model that can be served. Raises LoadError."""

    async def launch(self, needs: MemoryNeeds, kv_bytes: int) -> ModelProcess:
        """Start its process, whose K and V may take so many bytes at first. Raises OSError."""


@dataclass(slots=True)
class ManagedModel:
    """One model that may be loaded."""

    source: ModelSource
    keep: KeepAlive
    needs: MemoryNeeds | None = None
    unfit: LoadError | None = None
    """Why it cannot be served here."""
    read: ModelSource | None = None
    """Whose needs these are: its files may have been replaced since."""
    process: ModelProcess | None = None
    loading: "asyncio.Task[None] | None" = None
    kv_bytes: int = 0
    """What K and V may take now."""
    users: int = 0
    """Requests that wait for it or are answered by it."""
    last_used: float = -math.inf
    loaded_at: float = -math.inf
    waits_since: float | None = None
    """For memory: when it was first asked for; None where it has no place in the line."""
    waits_until: float = -math.inf
    """When it loses the place, if nobody asks for it meanwhile."""
    yields_to: "ManagedModel | None" = None
    """Which model gets its memory, as long as that one waits."""
    failed: tuple[float, LoadError] | None = None
    """When it could not be loaded last, and why."""
    loads: int = 0
    load_seconds: float = 0.0
    """Of all loads together."""
    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(END_REASONS, 0))

    @property
    def name(self) -> str:
        """Return what it is called."""
        return self.source.name

    @property
    def pinned(self) -> bool:
        """Return whether it stays, once it is loaded."""
        return self.source.pinned

    @property
    def held_bytes(self) -> int:
        """Return the part of the budget that it has."""
        if self.process is None or self.needs is None:
            return 0
        return self.needs.fixed_bytes + self.kv_bytes

    @property
    def loaded(self) -> bool:
        """Return whether it answers requests."""
        return self.process is not None and self.process.alive

    @property
    def at_rest(self) -> bool:
        """Return whether it has no process, and nobody asks for it."""
        return self.process is None and self.loading is None and not self.users

    @property
    def idle(self) -> bool:
        """Return whether it could be unloaded without taking it from anybody."""
        return self.loaded and not self.users and self.loading is None and not self.pinned


class ModelSupervisor:
    """Loads and unloads models. Only one event loop calls."""

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
        """Held by whoever shares out memory."""
        self._changed = asyncio.Event()
        self._reloads: set[asyncio.Task[None]] = set()

    def update(self, sources: Iterable[ModelSource]) -> None:
        """Take the models that there are now, and their files. One that is loaded or used stays as
        it is."""
        found = {source.name: source for source in sources}
        for name, model in list(self.models.items()):
            if model.at_rest and name not in found:
                del self.models[name]
            elif model.at_rest and model.source != found[name]:
                model.source, model.failed = found[name], None
        for name, source in found.items():
            if name not in self.models:
                keep = KeepAlive(self._settings.keep_alive_s)
                self.models[name] = ManagedModel(source, keep)

    @property
    def loaded(self) -> list[ManagedModel]:
        """Return the models that are loaded, the one that was used last first."""
        found = [model for model in self.models.values() if model.loaded]
        return sorted(found, key=lambda model: (-model.users, -model.last_used))

    @property
    def at_hand(self) -> ManagedModel | None:
        """Return the model for who names none: the one that was used last of those that are loaded,
        else of all; else one that is pinned, or the only one."""
        models = list(self.models.values())
        used = [model for model in models if model.last_used > -math.inf or model.pinned]
        former = sorted(used, key=lambda model: (-model.last_used, model.name))
        return next(iter((*self.loaded, *former, *(models if len(models) == 1 else ()))), None)

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - sum(model.held_bytes for model in self.models.values())

    async def fits(self, model: ManagedModel) -> bool:
        """Return whether a model can be served within the budget, and find out what it needs."""
        with suppress(LoadError):
            return (await self._needs_of(model)).least_bytes <= self.budget_bytes
        return False

    async def _needs_of(self, model: ManagedModel) -> MemoryNeeds:
        """Return what a model takes, and remember it. Raises LoadError."""
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
        """Keep the model, once it is loaded, while it is used. client: who uses it. keep_alive_s:
        how long it should stay afterwards; negative: for ever."""
        model.users += 1
        try:
            yield
        finally:
            model.users -= 1
            model.last_used = self._clock()
            model.keep.used(client, model.last_used, keep_alive_s)
            self._has_changed()

    def running(self, model: ManagedModel) -> ModelProcess | None:
        """Return the process of a model; None where it has to be loaded first. Raises NoRoomError
        where another model is to have its memory."""
        if not model.loaded:
            return None
        if model.yields_to is not None and self._waits(model.yields_to):
            self._line_up(model)
            raise self._no_room(model)
        return model.process

    async def process_of(self, model: ManagedModel) -> ModelProcess:
        """Return the process of a model that is used; load it first where it is not loaded. Raises
        LoadError, NoRoomError."""
        if model.failed is not None and self._clock() - model.failed[0] < RETRY_LOAD_S:
            raise model.failed[1]
        while (process := self.running(model)) is None:
            await self.load(model)
        return process

    async def load(self, model: ManagedModel) -> None:
        """Load a model, or wait for who does already. Raises LoadError, NoRoomError."""
        if model.loading is None:
            self._line_up(model)
            model.loading = asyncio.create_task(self._load(model))
            model.loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(model.loading)

    async def _load(self, model: ManagedModel) -> None:
        try:
            if model.process is not None:  # one that ends
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
        """Start the model's process with what is free. Raises LoadError."""
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
        """Return for how many seconds a loaded model stays if nobody asks it; None for ever."""
        if model.pinned or model.keep.until == math.inf:
            return None
        return max(0.0, model.keep.until - self._clock())

    # --- memory ---------------------------------------------------------------------------------

    async def _make_room(self, model: ManagedModel, needs: MemoryNeeds) -> bool:
        """Have others leave what the model needs. False where running answers have to end before.
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
        # While one ends, another may be asked for: they are chosen again each time.
        while (missing := wanted - self.free_bytes) > 0:
            victims = self._victims(model, missing)
            if any(victim.users for victim in victims):
                for victim in victims:
                    victim.yields_to = model
                return False
            await self._unload(victims[0], "room", f"{model.name} needs its memory")
        return True

    def _others(self, model: ManagedModel) -> list[ManagedModel]:
        """Return the other models that are loaded, the one that was used longest ago first."""
        return [other for other in reversed(self.loaded) if other is not model]

    def _victims(self, model: ManagedModel, missing: int) -> list[ManagedModel]:
        """Return whose memory a model may have, so many bytes or more. Raises NoRoomError."""
        victims: list[ManagedModel] = []
        for other in self._others(model):
            if missing > 0 and self._goes_at(other, model) <= self._clock():
                victims.append(other)
                missing -= other.held_bytes
        if missing > 0:
            raise self._no_room(model)
        return victims

    def _goes_at(self, model: ManagedModel, other: ManagedModel) -> float:
        """Return when a model may go for another one that waits: when it has been idle for long
        enough, or both have had their turn: to stay, and to wait."""
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
        """Return how many bytes are kept for those before a model in the line that have waited for
        their turn."""
        assert model.waits_since is not None
        latest = self._clock() - self._turn_s
        return sum(
            other.needs.least_bytes
            for other in self.models.values()
            if other.needs is not None and other.waits_since is not None and self._waits(other)
            if other.waits_since < model.waits_since and other.waits_since <= latest
        )

    def _waits(self, model: ManagedModel) -> bool:
        """Return whether a model waits for memory, or will be asked for again."""
        is_asked_for = model.loading is not None or self._clock() <= model.waits_until
        return model.waits_since is not None and is_asked_for

    def _no_room(self, model: ManagedModel) -> NoRoomError:
        """Return when to ask again for a model. It keeps its place in the line."""
        now = self._clock()
        room_at = min((self._goes_at(its, model) for its in self._others(model)), default=now)
        wait_s = 0.0 if room_at == math.inf else room_at - now
        error = NoRoomError(max(RETRY_AFTER_S, math.ceil(wait_s)))
        model.waits_until = now + error.retry_after_s + PLACE_KEPT_S
        return error

    async def _limit(self, model: ManagedModel, kv_bytes: int) -> None:
        """Let a model's K and V take so many bytes, or what it uses."""
        if model.process is None or kv_bytes == model.kv_bytes:
            return
        # More is counted before it may be used, less once it is not.
        before, model.kv_bytes = model.kv_bytes, max(model.kv_bytes, kv_bytes)
        told = await model.process.set_kv_limit(kv_bytes)
        model.kv_bytes = before if told is None else min(told, model.kv_bytes)

    async def _share_out(self) -> None:
        """Give what is free to the models that are loaded, the one that was used last first."""
        async with self._turn:
            for model in self.loaded:
                assert model.needs is not None
                more = min(self.free_bytes, model.needs.most_kv_bytes - model.kv_bytes)
                if more > 0:
                    await self._limit(model, model.kv_bytes + more)

    # --- ending ---------------------------------------------------------------------------------

    async def stop_model(self, model: ManagedModel) -> bool:
        """Unload a model that nobody uses now; False where somebody does."""
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
            reload = asyncio.create_task(self._reload(model))
            self._reloads.add(reload)
            reload.add_done_callback(self._reloads.discard)

    async def _reload(self, model: ManagedModel) -> None:
        """Load a model again whose GPU failed: something else stands under its K and V now."""
        with suppress(LoadError, NoRoomError):
            await self.load(model)

    async def keep_time(self) -> None:
        """Unload models that nobody wants any more; share out what others leave. Never returns."""
        while True:
            changed = self._changed
            async with self._turn:
                while (model := self._next_to_go) is not None and model.keep.until <= self._clock():
                    await self._unload(model, "keep_alive", "nobody has used it for its keep_alive")
            await self._share_out()
            wait_s = math.inf if model is None else model.keep.until - self._clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if wait_s == math.inf else max(0.0, wait_s)):
                    await changed.wait()

    def _has_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def _next_to_go(self) -> ManagedModel | None:
        """Return the idle model that is the first that nobody will want any more."""
        idle = (model for model in self.models.values() if model.idle)
        return min(idle, key=lambda model: model.keep.until, default=None)

    def end_answers(self) -> None:
        """Have all processes end their answers, with an error, and themselves."""
        for model in self.models.values():
            if model.process is not None:
                model.process.tell_to_stop()

    async def close(self) -> None:
        """End all processes."""
        tasks = [model.loading for model in self.models.values() if model.loading is not None]
        for task in (*tasks, *self._reloads):
            task.cancel()
        await asyncio.gather(*tasks, *self._reloads, return_exceptions=True)
        processes = [its.process for its in self.models.values() if its.process is not None]
        await asyncio.gather(*(process.stop() for process in processes))
