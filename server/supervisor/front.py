"""The front is the process that clients connect to. It finds the model that a request names."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from engine.power import KeepAwake
from server.catalogue.lookup import aliases
from server.catalogue.names import nearest
from server.chat.drain import Drain
from server.config import Config
from server.protocol.wire_errors import ApiError, UnknownModelError
from server.supervisor.models import ManagedModel, ModelSource, ModelSupervisor

LATEST = ":latest"
LOADED = "loaded"
"""As a value in the setting models.aliases, this means the model that was used last."""
# Shortest time between two searches of the disk for models.
RESCAN_S = 2.0
# Seconds between two checks for running requests. An idle machine takes minutes to fall asleep.
AWAKE_POLL_S = 5.0
NOTHING_LOADED = "No model has been used yet: name one of those that GET /v1/models lists."


def match_name(
    name: str | None, models: Collection[str], aliases: Mapping[str, str], at_hand: str | None
) -> str | None:
    """Return the name of the model that ``name`` means, or None. Letter case is ignored. ``models``
    are hub ids or folders' names. ``aliases`` is ``{pattern such as gpt-*: a model's name or
    LOADED}``, and the first match counts. LOADED and a missing ``name`` mean ``at_hand``."""
    plain = (name or "").removesuffix(LATEST).rstrip("/")
    if not plain:
        return at_hand
    if (own := _match_own(plain, models)) is not None:
        return own
    small = plain.casefold()
    target = next((aliases[one] for one in aliases if fnmatchcase(small, one.casefold())), None)
    return at_hand if target == LOADED else _match_own(target, models)


def _match_own(name: str | None, models: Collection[str]) -> str | None:
    """Return a model's full name. ``name`` may lack the part ``org/`` if the rest is unique."""
    if name is None or name in models:
        return name
    plain = name.casefold()
    base = plain.rpartition("/")[2]
    alike = [model for model in models if base == model.casefold().rpartition("/")[2]]
    same = [model for model in alike if plain == model.casefold()]
    matches = same or [model for model in alike if "/" not in name or "/" not in model]
    return matches[0] if len(matches) == 1 else None


@dataclass(slots=True)
class Front:
    """The state of the process that clients connect to: its settings, and all models."""

    config: Config
    models: ModelSupervisor
    find: Callable[[], Iterable[ModelSource]]
    """Searches the disk for all models that can be served, which takes long."""
    awake: KeepAwake | None = None
    """Keeps the machine awake during answers. It is None if the machine may sleep."""
    drain: Drain = field(default_factory=Drain)
    templates: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "templates"))
    """The thread that reads the models' chat templates."""
    _disk: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "disk"))
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _looked_at: float = -math.inf

    def _find(self, name: str | None) -> ManagedModel | None:
        models, own = self.models.models, self.config.models.aliases
        # An alias in the settings takes precedence over quire's own alias of the same name.
        brought = {short: model for short, model in aliases().items() if short not in own}
        at_hand = None if (model := self.models.at_hand) is None else model.name
        match = match_name(name, models, own | brought, at_hand)
        return None if match is None else models[match]

    async def refresh(self) -> None:
        """Search the disk for models, unless the last search ended less than RESCAN_S ago."""
        async with self._looking:  # concurrent requests share one search
            if time.monotonic() - self._looked_at < RESCAN_S:
                return
            # In a thread, so that a slow search does not delay requests to loaded models.
            loop = asyncio.get_running_loop()
            self.models.update(await loop.run_in_executor(self._disk, lambda: list(self.find())))
            self._looked_at = time.monotonic()

    async def fitting(self) -> AsyncIterator[ManagedModel]:
        """Search the disk again, and yield the models that this machine can serve."""
        await self.refresh()
        for model in list(self.models.models.values()):
            if await self.models.fits(model):
                yield model

    async def model_of(self, name: str | None) -> ManagedModel:
        """Return the named model. Search the disk if it is missing or unused. Raises ApiError."""
        model = self._find(name)
        if model is None or model.at_rest:
            await self.refresh()
            model = self._find(name)
        if model is not None:
            return model
        if name:
            raise UnknownModelError(name, nearest(name, self.models.models))
        raise ApiError(
            404, NOTHING_LOADED, type="not_found_error", param="model", code="model_not_found"
        )

    async def keep_awake(self, awake: KeepAwake) -> None:
        """Keep the machine from sleeping while requests run. Never returns."""
        try:
            while True:
                awake.update(busy=any(model.users for model in self.models.models.values()))
                await asyncio.sleep(AWAKE_POLL_S)
        finally:
            awake.end()

    @property
    def alive(self) -> bool:
        """Always True: the front has no engine that could end."""
        return True

    def end_all(self, message: str) -> None:
        self.models.end_answers()
