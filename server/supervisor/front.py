"""What clients of several models see: one address, and each request at its model."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from engine.power import KeepAwake
from server.catalogue.lookup import aliases
from server.chat.drain import Drain
from server.config import Config
from server.protocol.wire_errors import ApiError, UnknownModelError
from server.supervisor.models import ManagedModel, ModelSource, ModelSupervisor

LATEST = ":latest"
LOADED = "loaded"
"""What a name stands for that means whatever is loaded."""


class ModelNames:
    """The models' own names, and what else clients call them."""

    def __init__(
        self,
        models: Collection[str],
        aliases: Mapping[str, str],
        at_hand: Callable[[], str | None],
    ) -> None:
        """models: a hub id or a folder's name each; they may come and go. aliases: patterns such as
        ``gpt-*``, and the model that each stands for, or LOADED; the first that matches counts.
        at_hand: returns the model that is loaded, or would be the first; None where there is no
        such one."""
        self._models = models
        self._aliases = aliases
        self._at_hand = at_hand

    def find(self, name: str | None) -> str | None:
        """Return the model of that name; None where there is none. name: None stands for the model
        that is at hand."""
        written = (name or "").removesuffix(LATEST).rstrip("/")
        if not written:
            return self._at_hand()
        return self._own(written) or self._meant(written)

    def _own(self, name: str) -> str | None:
        """Return the model with that name. The organisation may be left out where only one model is
        called so without it."""
        if name in self._models:
            return name
        base = name.rpartition("/")[2]
        found = [model for model in self._models if base == model.rpartition("/")[2]]
        whole = [model for model in found if "/" not in name or "/" not in model]
        return whole[0] if len(whole) == 1 else None

    def _meant(self, name: str) -> str | None:
        for pattern, model in self._aliases.items():
            if fnmatchcase(name, pattern):
                return self._at_hand() if model == LOADED else self._own(model)
        return None


# The disk is not looked at more often.
RESCAN_S = 2.0
# A machine that is idle falls asleep after minutes.
AWAKE_POLL_S = 5.0
NOTHING_LOADED = "No model has been used yet: name one of those that GET /v1/models lists."


@dataclass(slots=True)
class Front:
    """All that the front's routes are made of."""

    config: Config
    models: ModelSupervisor
    find: Callable[[], Iterable[ModelSource]]
    """Returns all models of this disk that can be served; takes a while."""
    awake: KeepAwake | None = None
    """Holds the machine awake; None where it may sleep."""
    drain: Drain = field(default_factory=Drain)
    templates: ThreadPoolExecutor = field(default_factory=lambda: _one_thread("templates"))
    """Where is waited for what models can do."""
    _disk: ThreadPoolExecutor = field(default_factory=lambda: _one_thread("disk"))
    _names: ModelNames = field(init=False)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _looked_at: float = -math.inf

    def __post_init__(self) -> None:
        # Who serves says what names mean; the short names that come along count behind that.
        own = self.config.models.aliases
        further = {short: model for short, model in aliases().items() if short not in own}
        models = self.models
        self._names = ModelNames(
            models.models,
            own | further,
            lambda: its.name if (its := models.at_hand) else None,
        )

    async def refresh(self) -> None:
        """Look which models there are now, and of which files."""
        async with self._looking:  # whoever comes meanwhile waits for what is found
            if time.monotonic() - self._looked_at < RESCAN_S:
                return
            loop = asyncio.get_running_loop()
            # Not where requests of models that are loaded have their work done: it may take long.
            self.models.update(await loop.run_in_executor(self._disk, lambda: list(self.find())))
            self._looked_at = time.monotonic()

    async def fitting(self) -> AsyncIterator[ManagedModel]:
        """Look which models there are now, and yield those that can be served."""
        await self.refresh()
        for model in list(self.models.models.values()):
            if await self.models.fits(model):
                yield model

    async def model_of(self, name: str | None) -> ManagedModel:
        """Return the model that a client means, of the newest files unless it is loaded. Raises
        ApiError (404)."""
        found = self._names.find(name)
        if found is None or self.models.models[found].at_rest:
            await self.refresh()
            found = self._names.find(name)
        if found is None:
            raise UnknownModelError(name) if name else _no_model_named()
        return self.models.models[found]

    async def keep_awake(self, awake: KeepAwake) -> None:
        """Hold the machine awake while models are used, or others may ask. Never returns."""
        try:
            while True:
                awake.update(busy=any(model.users for model in self.models.models.values()))
                await asyncio.sleep(AWAKE_POLL_S)
        finally:
            awake.end()

    @property
    def alive(self) -> bool:
        """Whether answers can still come to their own end."""
        return True

    def end_all(self, message: str) -> None:
        """Have all models end their answers."""
        self.models.end_answers()


def _one_thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix=name)


def _no_model_named() -> ApiError:
    return ApiError(
        404, NOTHING_LOADED, type="not_found_error", param="model", code="model_not_found"
    )
