"""What clients of several models see: one address, and each request at its model."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.power import KeepAwake
from server.catalogue.lookup import aliases
from server.chat.drain import Drain
from server.config import Config
from server.protocol.wire_errors import ApiError, model_not_found
from server.supervisor.models import ManagedModel, ModelSupervisor
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
    find: Callable[[], Iterable[ManagedModel]]
    """Returns all models of this disk that can be served; takes a while."""
    awake: KeepAwake | None = None
    """Holds the machine awake; None where it may sleep."""
    drain: Drain = field(default_factory=Drain)
    _looked_at: float = -math.inf

    async def refresh(self) -> None:
        """Look which models there are now."""
        if time.monotonic() - self._looked_at < RESCAN_S:
            return
        found = {model.name: model for model in await asyncio.to_thread(lambda: list(self.find()))}
        self._looked_at = time.monotonic()
        for name in [name for name in self.models.models if name not in found]:
            self.models.remove(name)
        for name, model in found.items():
            if name not in self.models.models:
                self.models.add(model)

    async def model_of(self, name: str | None) -> ManagedModel:
        """Return the model that a client means. Raises ApiError (404)."""
        found = self._named(name)
        if found is None:
            await self.refresh()
            found = self._named(name)
        if found is None:
            raise model_not_found(name) if name else _no_model_named()
        return self.models.models[found]

    def _named(self, name: str | None) -> str | None:
        # Who serves says what names mean; the short names that come along count behind that.
        own = self.config.models.aliases
        further = {short: model for short, model in aliases().items() if short not in own}
        names = ModelNames(self.models.models, own | further)
        at_hand = self.models.at_hand
        return names.find(name, at_hand.name if at_hand else None)

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


def _no_model_named() -> ApiError:
    return ApiError(
        404, NOTHING_LOADED, type="not_found_error", param="model", code="model_not_found"
    )
