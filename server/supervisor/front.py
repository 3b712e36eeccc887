"""What clients of several models see: one address, and each request at its model."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from engine.power import KeepAwake
from server.catalogue.lookup import aliases
from server.chat.drain import Drain
from server.config import Config
from server.protocol.wire_errors import ApiError, model_not_found
from server.supervisor.models import ManagedModel, ModelSource, ModelSupervisor
from server.supervisor.names import ModelNames

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
            raise model_not_found(name) if name else _no_model_named()
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
