"""The front is the process that clients connect to. It finds the model that a request names."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial

from httpcore2 import Response
from pydantic_core import from_json

from engine.power import KeepAwake
from server.catalogue.lookup import aliases
from server.catalogue.names import match, nearest, plain_name
from server.chat.drain import Drain
from server.config import Config
from server.protocol.ollama.answer import Loaded, ModelInfo
from server.protocol.wire_errors import (
    RETRY_AFTER_S,
    ApiError,
    UnknownModelError,
    come_back,
    unavailable,
)
from server.routes.ollama import PS
from server.supervisor.metrics import FrontMetrics
from server.supervisor.models import ManagedModel, ModelSource, ModelSupervisor, NoRoomError
from server.supervisor.process import Headers, LoadError, NoAnswerError

LOADED = "loaded"
"""As a value in the setting models.aliases, this means the model that was used last."""
# Shortest time between two searches of the disk for models.
RESCAN_S = 2.0
# Seconds between two checks for running requests. An idle machine takes minutes to fall asleep.
AWAKE_POLL_S = 5.0
NOTHING_LOADED = "No model has been used yet: name one of those that GET /v1/models lists."
FAILURES: dict[type[Exception], tuple[str, str]] = {
    LoadError: ("model_not_loaded", "The model {} was not loaded: {}"),
    NoRoomError: ("no_memory_for_model", "There is no memory for {} now: {}"),
    TimeoutError: ("model_loading", "The model {} is still being loaded"),
    NoAnswerError: ("model_ended", "The process of {} has ended before its answer"),
}


def match_name(
    name: str | None, models: Collection[str], aliases: Mapping[str, str], at_hand: str | None
) -> str | None:
    """Return the name of the model that ``name`` means, or None. ``models`` are hub ids or folders'
    names. ``aliases`` is ``{pattern such as gpt-*: a model's name or LOADED}``, and the first match
    counts. LOADED and a missing ``name`` mean ``at_hand``."""
    plain = plain_name(name or "")
    if not name or not plain:
        return at_hand
    if (own := match(name, models)) is not None:
        return own
    target = next((aliases[one] for one in aliases if fnmatchcase(plain, one.casefold())), "")
    return at_hand if target == LOADED else match(target, models)


def failure_of(model: str, error: Exception) -> ApiError:
    """Return the error for clients whose request to a model has failed with ``error``."""
    code, text = FAILURES[type(error)]
    after_s = error.retry_after_s if isinstance(error, NoRoomError) else RETRY_AFTER_S
    return come_back(503, text.format(model, error), code, after_s)


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
    metrics: FrontMetrics = field(init=False)
    replicas: None = None
    _templates: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "templates"))
    """The thread that reads the models' chat templates."""
    _disk: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "disk"))
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _looked_at: float = -math.inf

    def __post_init__(self) -> None:
        self.metrics = FrontMetrics(self.models, self._headers)

    @property
    def _headers(self) -> Headers:
        key = self.config.access.first_key
        return [
            (b"host", b"localhost"),
            *([(b"authorization", f"Bearer {key}".encode())] if key else []),
        ]

    def _find(self, name: str | None) -> ManagedModel | None:
        models, own = self.models.models, self.config.models.aliases
        # An alias in the settings takes precedence over quire's own alias of the same name.
        brought = {short: model for short, model in aliases().items() if short not in own}
        at_hand = None if (model := self.models.at_hand) is None else model.name
        meant = match_name(name, models, own | brought, at_hand)
        return None if meant is None else models[meant]

    async def refresh(self) -> None:
        """Search the disk for models, unless the last search ended less than RESCAN_S ago."""
        async with self._looking:  # concurrent requests share one search
            if time.monotonic() - self._looked_at < RESCAN_S:
                return
            # In a thread, so that a slow search does not delay requests to loaded models.
            loop = asyncio.get_running_loop()
            self.models.update(await loop.run_in_executor(self._disk, lambda: list(self.find())))
            self._looked_at = time.monotonic()

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

    async def keep_awake(self) -> None:
        """Keep the machine from sleeping while requests run, until cancelled."""
        if (awake := self.awake) is None:
            return
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

    async def check_ready(self) -> None:
        """The front is ready once all pinned models are loaded."""
        for model in self.models.models.values():
            if model.pinned and not model.loaded:
                raise unavailable(f"{model.name} is not loaded yet.")

    async def list_models(self) -> list[ModelInfo]:
        """Search the disk again, and return the models that this machine can serve."""
        await self.refresh()
        models = list(self.models.models.values())
        return [self._info_of(model) for model in models if await self.models.fits(model)]

    async def list_loaded(self) -> list[ModelInfo]:
        answers = await self.models.ask_loaded(PS.encode(), self._headers)
        return [
            replace(self._info_of(model), loaded=self._state_of(model, answer))
            for model, answer in answers
            if model.loaded
        ]

    async def find_model(self, name: str | None) -> ModelInfo:
        model = await self.model_of(name)
        if not await self.models.fits(model):
            raise UnknownModelError(model.name)
        return self._info_of(model)

    async def describe_model(self, name: str | None) -> ModelInfo:
        info = await self.find_model(name)
        source, loop = self.models.models[info.name].source, asyncio.get_running_loop()
        try:
            names, template = await loop.run_in_executor(self._templates, source.abilities)
        except LoadError as error:
            raise failure_of(info.name, error) from error
        return replace(info, capabilities=names, template=template)

    def _info_of(self, model: ManagedModel) -> ModelInfo:
        assert model.needs is not None
        facts, state = model.source.facts(), self.models.state_of(model)
        return ModelInfo(model.name, facts, model.needs.max_model_len, state=state)

    def _state_of(self, model: ManagedModel, answer: Response | None) -> Loaded:
        """Return a loaded model's state. ``answer`` is its process's answer to PS. Without the
        answer, the size is the most that the model may take: Ollama's clients expect a number."""
        assert model.needs is not None
        size_bytes = max_bytes = model.held_bytes
        if answer is not None and answer.status == 200:
            size_bytes = int(from_json(answer.content)["models"][0]["size"])
        wait_s = self.models.kept_for_s(model)
        until = None if wait_s is None else datetime.now(UTC) + timedelta(seconds=wait_s)
        return Loaded(size_bytes, max_bytes, on_gpu=model.needs.on_gpu, expires_at=until)
