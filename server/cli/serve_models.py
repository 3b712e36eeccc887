"""Serve several models: a front process for clients, and a process for each loaded model."""

import fcntl
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import structlog
from pydantic import SecretStr

from engine.kv_backend import memory_of_all_models
from engine.models.checkpoint import CheckpointError
from kvcache.child import Child
from server.catalogue.folder_reader import FolderReader
from server.catalogue.lm_studio import is_below, lm_studio_folders
from server.catalogue.local_models import LocalModel, Place, local_models, template_facts
from server.catalogue.lookup import look_up
from server.cli.banner import announce_several
from server.cli.model_files import ModelError, facts_of, model_errors, new_reader
from server.cli.models import Machine
from server.cli.serve import STOP_TIMEOUT_S, begin_serving, keep_awake
from server.config import Config, SettingError, StartError, engine_config
from server.http.listener import reserve, reserved_for_ollama
from server.http.server import serve_app
from server.protocol.ollama.answer import ModelFacts, capabilities
from server.supervisor.app import create_front
from server.supervisor.front import Front
from server.supervisor.models import MemoryNeeds, ModelSupervisor
from server.supervisor.process import IDLE_CONNECTION_S, LoadError, ModelProcess, Start

# Memory that Python and libraries take in a model's process, which no plan includes.
PROCESS_BYTES = 160 * 1024**2
# -P: modules of the folder in which quire was started are not imported.
COMMAND = (sys.executable, "-P", "-c", "from server.cli.model_process import main; main()")
# Prefix of the folder with the models' sockets; name of the file there that a server locks.
FOLDER_PREFIX, LOCK_FILE = "quire-front-", "lock"
# How long K and V of a prefix are cached: until the model's process ends or memory is short.
FOR_EVER_S = 1e9
# If no model can be served, the error names the problems of at most this many models.
NAMED_PROBLEMS = 3

log = structlog.get_logger("quire")


def serve_models(names: Sequence[str], settings: Config, reading: Child | None = None) -> None:
    """Serve models until a signal arrives. names: the models' names; if empty, all models on this
    disk are served. reading: the process in which a FolderReader reads. Raises StartError."""
    begin_serving(settings)
    with (
        reserve(settings.server.host, settings.server.port) as listener,
        reserved_for_ollama(settings.server) as others,
        socket_folder() as folder,
    ):
        start = Start(COMMAND, folder, settings.server.drain_s + STOP_TIMEOUT_S)
        front = make_front(settings, names, start, reading)
        models = list(front.models.models)
        announce = partial(announce_several, settings, models, front.models.budget_bytes)
        serve_app(settings, create_front(front), front, listener, announce, others)
    log.info("ended")


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Yield a new temporary folder. Remove unlocked old folders, whose servers were killed."""
    for file in Path(gettempdir()).glob(f"{FOLDER_PREFIX}*/{LOCK_FILE}"):
        with suppress(OSError):
            if file.parent.lstat().st_uid == os.getuid():
                with file.open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(file.parent)
    with (
        TemporaryDirectory(prefix=FOLDER_PREFIX) as name,
        (Path(name) / LOCK_FILE).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def make_front(
    settings: Config, names: Sequence[str], start: Start, reading: Child | None = None
) -> Front:
    """Find the models, and make the server's Front. Raises ModelError if no model can be served."""
    budget_bytes = settings.models.memory_budget or memory_of_all_models(engine_config(settings))
    machine = Machine(settings, budget_bytes - PROCESS_BYTES)
    number = itertools.count(1).__next__
    if settings.engine.draft_model:
        raise SettingError(
            "engine.draft_model (--draft) is for one model: of several, each takes its own head, "
            "or its companion on this disk"
        )
    disk = Disk(settings.models.folders, names, new_reader(settings, reading))
    templates = FolderReader()

    def sources(models_here: Iterable[LocalModel]) -> list[ModelOnDisk]:
        return [ModelOnDisk(local, machine, start, number, templates) for local in models_here]

    models = ModelSupervisor(settings.models, budget_bytes)
    checked = disk.checked()
    studios = lm_studio_folders()
    if count := sum(is_below(model.folder, studios) for model in checked):
        log.info(f"{count} of the models lie in LM Studio's folder: quire only reads them")
    models.update(sources(checked))
    return Front(settings, models, lambda: sources(disk.models()), keep_awake(settings))


class Disk:
    """The models on this disk that the settings and the command line select."""

    def __init__(
        self,
        folders: Sequence[Path],
        names: Sequence[str],
        reader: FolderReader | None = None,
    ) -> None:
        """folders: searched beside the hub's cache. names: the names or folders of the models to
        serve; none means all models."""
        self._reader = reader or FolderReader()
        with model_errors(), self._reader:
            self._named = {
                name: look_up(name, folders, self._reader, on_disk=True) for name in names
            }
        self._folders = folders
        places = self._named.values()
        self._given = [place.folder for place in places if place.folder is not None]

    def models(self) -> list[LocalModel]:
        return self._served(self._all())

    def checked(self) -> list[LocalModel]:
        """Return ``models()``. Raises ModelError if a named model cannot be served, or none can."""
        models = self._all()
        for name, place in self._named.items():
            meant = [model for model in models if _is_at(place, model)]
            if not meant:
                raise ModelError(f"{name}: it is not on this disk: `quire pull {name}` fetches it")
            if problem := meant[0].problem:
                raise ModelError(f"{name}: {problem}")
        if all(model.problem for model in models):
            why = "".join(f"; {model.name}: {model.problem}" for model in models[:NAMED_PROBLEMS])
            raise ModelError(
                f"there is no model on this disk that can be served{why}: `quire pull ORG/NAME` "
                "fetches one, and `quire serve demo` needs none"
            )
        return self._served(models)

    def _all(self) -> list[LocalModel]:
        """Return all models in the configured folders, the hub's cache, and the command line's
        folders. A model on the command line replaces another model of the same name."""
        with self._reader as reader:
            models = {model.name: model for model in local_models(self._folders, reader=reader)}
            known = {model.folder.resolve() for model in models.values()}
            given = [folder for folder in self._given if folder.resolve() not in known]
            more = local_models(given, hub=False, reader=reader)
            models |= {model.name: model for model in more}
        return [models[name] for name in sorted(models, key=str.lower)]

    def _served(self, models: Iterable[LocalModel]) -> list[LocalModel]:
        """Return the models that can be served, of those that were named."""
        able, places = [each for each in models if each.problem is None], self._named.values()
        return [each for each in able if not places or any(_is_at(place, each) for place in places)]


def _is_at(place: Place, model: LocalModel) -> bool:
    """Return whether a model is in the place that was found for a name. A name pinned to a commit
    does not match if the repository's model on this disk is of another commit."""
    if place.folder is not None:
        return model.folder.resolve() == place.folder.resolve()
    pinned = place.revision is None or (model.revision or "").startswith(place.revision)
    return model.revision is not None and model.name == place.name and pinned


@dataclass(frozen=True)
class ModelOnDisk:
    """A model on this disk, with all that is needed to start a process for the model."""

    local: LocalModel
    machine: Machine
    start: Start
    number: Callable[[], int]
    """Returns a number that no earlier process has."""
    templates: FolderReader = field(default_factory=FolderReader)
    """Reads the chat templates of all models, one after the other."""

    @property
    def name(self) -> str:
        return self.local.name

    @property
    def pinned(self) -> bool:
        return self.name.casefold() in map(str.casefold, self.machine.settings.models.pinned)

    def needs(self) -> MemoryNeeds:
        """Return the memory that the model needs on this machine. Raises LoadError."""
        assert self.local.checkpoint is not None
        try:
            engine_plan = self.machine.plan(self.local.checkpoint)
        except StartError as error:
            raise LoadError(str(error)) from error
        plan, layout = engine_plan.memory, engine_plan.memory.layout
        step_tokens = engine_config(self.machine.settings).max_num_batched_tokens
        heaps = -(-layout.bytes_for(plan.max_model_len, step_tokens) // layout.heap_bytes)
        return MemoryNeeds(
            plan.demand.fixed_bytes + plan.state_bytes + PROCESS_BYTES,
            min(heaps * layout.heap_bytes, plan.kv_budget_bytes),
            plan.kv_budget_bytes,
            plan.max_model_len,
            engine_plan.on_gpu,
            plan.state_bytes,
        )

    def facts(self) -> ModelFacts:
        return facts_of(self.local)

    def abilities(self) -> tuple[tuple[str, ...], str]:
        """Tell from the chat template whether the model calls tools or thinks. Raises LoadError."""
        try:
            with self.templates as reader:
                calls, thinks, text = reader.read(template_facts, self.local.folder)
        except CheckpointError as error:
            raise LoadError(str(error)) from error
        return capabilities(embeds=self.local.embeds, calls=calls, thinks=thinks), text

    async def launch(self, needs: MemoryNeeds, kv_bytes: int) -> ModelProcess:
        """Start the model's process. kv_bytes: initial memory limit of K and V. Raises OSError."""
        message = {
            "model": str(self.local.folder),
            "settings": settings_of(self.machine.settings, self.name, needs),
            "kv_limit": kv_bytes,
        }
        return await ModelProcess.start(self.name, self.number(), self.start, message)


def settings_of(settings: Config, name: str, needs: MemoryNeeds) -> dict[str, Any]:
    tables = plain_settings(settings)
    # Only the process that answers clients keeps the machine awake.
    tables["server"] |= {"served_model_name": name, "page": False, "keep_awake": False}
    tables["engine"] |= {"max_model_len": needs.max_model_len}
    kv_budget = needs.most_kv_bytes + needs.state_bytes
    tables["cache"] |= {"kv_budget": kv_budget, "prefix_keep_s": FOR_EVER_S}
    if file := settings.log.file:
        # Each process has a log file of its own: two processes cannot rotate one file.
        own = f"{file.stem}.{name.replace('/', '--')}{file.suffix}"
        tables["log"]["file"] = str(file.with_name(own))
    tables["limits"] |= {"keep_alive_s": int(10 * IDLE_CONNECTION_S)}
    return tables


def plain_settings(settings: Config) -> dict[str, Any]:
    """Return the settings, with secrets in plain text, as values for JSON."""
    tables: dict[str, Any] = json.loads(json.dumps(settings.model_dump(), default=_plain))
    return tables


def _plain(value: object) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
