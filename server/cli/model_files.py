"""Checks a model's files against the settings and this machine before any weight is loaded."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from engine.build import EnginePlan
from engine.kv_backend import plan_for_this_machine, plan_on
from engine.models.checkpoint import Checkpoint, CheckpointError
from engine.models.config import ModelConfig
from kvcache.backends.choice import KVBackendChoice, KVBackendError
from kvcache.budget import BudgetError, gib
from kvcache.child import Child
from kvcache.layout import LayoutError
from server.catalogue.companions import OWN, Heads, companion_among, complete_folder
from server.catalogue.folder_reader import FolderReader, reading_process
from server.catalogue.hub import FoundModel, find_model, model_names
from server.catalogue.lm_studio import is_below, lm_studio_folders
from server.catalogue.local_models import (
    DTYPES,
    LocalModel,
    check_folder,
    check_vocabulary,
    checkpoint_in,
    digest_of,
    model_files,
    named_quantization,
    places_here,
    stored_as,
)
from server.catalogue.lookup import look_up
from server.catalogue.names import ModelNotFoundError
from server.chat.served_model import ServedModel
from server.config import Config, SettingError, StartError, engine_config
from server.protocol.common import OpenAISamplingFields
from server.protocol.ollama.answer import UNKNOWN, ModelFacts
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerError


def model_facts(checkpoint: Checkpoint) -> ModelFacts:
    """Read a model's facts from its files. Those about the model in memory keep their defaults."""
    config, files = ModelConfig(checkpoint.path), model_files(checkpoint.path)
    family = str(config.values.get("model_type", UNKNOWN))
    packing = stored_as(checkpoint, named_quantization(config.text.values))
    modified = max(file.stat().st_mtime for file in files)
    return _facts(checkpoint, family, packing, digest_of(files), modified)


def facts_of(model: LocalModel) -> ModelFacts:
    """Return a listed model's facts, from the list alone: the model's files are not read."""
    assert model.checkpoint is not None
    return _facts(model.checkpoint, model.family, model.quantization, model.digest, model.modified)


def _facts(
    checkpoint: Checkpoint, family: str, packing: str, digest: str, modified: float
) -> ModelFacts:
    quantization = packing.replace("-", "") if packing.endswith("-bit") else packing.upper()
    return ModelFacts(
        family=family,
        parameters=checkpoint.num_weights,
        quantization=checkpoint.dtype if packing in DTYPES.values() else quantization,
        size_bytes=checkpoint.stored_bytes,
        digest=digest,
        modified_at=datetime.fromtimestamp(modified, UTC),
    )


EMBEDS = {"auto": None, "generate": False, "embed": True}

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

log = structlog.get_logger("quire")


class ModelError(StartError):
    """Raised for a model that cannot be served."""

    exit_code = 3


def make_plan(
    settings: Config,
    checkpoint: Checkpoint,
    budget_bytes: int | None = None,
    choice: KVBackendChoice | None = None,
) -> EnginePlan:
    """Fit a model and its K and V into this machine's memory, or into budget_bytes. choice: a kind
    of memory for K and V; None means that a kind is chosen now, which tests the GPU. Raises
    SettingError, which names the size that does not fit."""
    config = engine_config(settings)
    with planning_errors():
        if choice is not None:
            return plan_on(choice, config, checkpoint, budget_bytes)
        return plan_for_this_machine(config, checkpoint, budget_bytes)


@contextmanager
def planning_errors() -> Iterator[None]:
    """Turn the errors of a plan into SettingError, which names the size that does not fit."""
    try:
        yield
    except (BudgetError, LayoutError, KVBackendError) as error:
        raise SettingError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model whose files are complete and checked."""

    plan: EnginePlan
    tokenizer: Tokenizer
    served: ServedModel


def read_model(
    name: str, settings: Config, reading: Child | None = None, *, any_name: bool = False
) -> ModelFiles:
    """Read and check a model's files; then fetch missing weights from the hub. reading: a started
    process that reads the files first, because malformed files may crash a process. any_name:
    whether the server accepts any model name in requests. Raises StartError."""
    reading = reading or reading_process()
    with model_errors():
        with closing(reading):
            reader = new_reader(settings, reading)
            model = find_model(name, settings.models.folders, reader=reader)
            if model.notice:
                log.warning(model.notice)
            heads = find_heads(reader, model, settings)
            if not any_name:  # with any_name the supervisor has said and checked all this already
                if is_below(model.folder, lm_studio_folders()):
                    log.info(f"{name} lies in LM Studio's folder: {model.folder}")
                check_found(reader, model, settings, heads)
            checkpoint = checkpoint_of(model, settings, heads)
            engine_plan = make_plan(settings, checkpoint)
            tokenizer, served = check_files(model, checkpoint, settings, any_name=any_name)
            if not checkpoint.embeds and (warning := tokenizer.template.try_out(reading)):
                log.warning(warning)
        if model.missing:
            log.info(f"downloading {model.asked}: {gib(model.missing_bytes)} of weights")
            model.fetch_weights()
            whole = replace(model, missing=())
            engine_plan = make_plan(settings, checkpoint_of(whole, settings, heads))
    for line in engine_plan.lines():
        log.debug(line)
    if left_out := engine_plan.checkpoint.left_out:
        log.info(left_out)
    for line in engine_plan.warnings:
        log.warning(line)
    memory = engine_plan.memory
    facts = replace(
        model_facts(engine_plan.checkpoint),
        weights_bytes=memory.demand.weights_bytes,
        fixed_bytes=memory.demand.fixed_bytes + memory.state_bytes,
        on_gpu=engine_plan.on_gpu,
    )
    return ModelFiles(engine_plan, tokenizer, replace(served, facts=facts))


def new_reader(settings: Config, reading: Child | None = None) -> FolderReader:
    """Return a reader that reads models as the settings say. reading: as for ``FolderReader``."""
    return FolderReader(EMBEDS[settings.engine.task], reading, engine_config(settings).drafts)


def find_heads(reader: FolderReader, model: FoundModel, settings: Config) -> Heads:
    """Find the head of engine.draft_model, or else a companion of the model, on this disk. Raises
    ModelNotFoundError."""
    name, folders = settings.engine.draft_model, settings.models.folders
    if not engine_config(settings).drafts:
        return Heads(drafts=False)
    if not name:
        companion = companion_among(places_here(folders), model.folder)
        return Heads(companion=companion, on_hub=model.misses_head)
    if (folder := complete_folder(*look_up(name, folders, reader))) is None:
        raise ModelNotFoundError(f"{name}: it is not on this disk: `quire pull {name}` fetches it")
    return Heads(named=str(folder))


def checkpoint_of(model: FoundModel, settings: Config, heads: Heads = OWN) -> Checkpoint:
    """Read a checkpoint; for missing weights take the hub's sizes. Raises CheckpointError."""
    return checkpoint_in(model.folder, EMBEDS[settings.engine.task], _promised_bytes(model), heads)


def check_found(
    reader: FolderReader,
    model: FoundModel,
    settings: Config,
    heads: Heads = OWN,
    *,
    tokenizer: bool = True,
) -> None:
    """Check a model's files in the reader's process, because a malformed file may crash a process.
    tokenizer: whether to check the tokenizer's files, too. Raises CheckpointError."""
    how = EMBEDS[settings.engine.task], _promised_bytes(model), tokenizer
    reader.read(check_folder, model.folder, *how, *heads)


def _promised_bytes(model: FoundModel) -> int | None:
    return model.weights_bytes if model.missing else None


def check_files(
    model: FoundModel, checkpoint: Checkpoint, settings: Config, *, any_name: bool = False
) -> tuple[Tokenizer, ServedModel]:
    """Read all of a model's files but the weights. any_name: as for ``read_model``. Raises
    TokenizerError, CheckpointError."""
    tokenizer = Tokenizer(model.folder, settings.prompts)
    check_vocabulary(model.folder, tokenizer, checkpoint)
    served = ServedModel(
        model_names(model, settings.server.served_model_name),
        sampling_defaults(model.folder),
        frozenset(checkpoint.eos_token_ids or tokenizer.end_ids) | tokenizer.answer_end_ids,
        any_name=any_name,
    )
    return tokenizer, served


@contextmanager
def model_errors() -> Iterator[None]:
    """Turn exceptions about a model's files into ModelError."""
    try:
        yield
    except (ModelNotFoundError, CheckpointError, TokenizerError) as error:
        raise ModelError(str(error)) from error


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling defaults of generation_config.json. Raises CheckpointError for values
    that are refused in requests as well."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    defaults = {key: config[key] for key in SAMPLING_DEFAULTS if config.get(key) is not None}
    try:
        OpenAISamplingFields.model_validate(defaults)
    except ValidationError as error:
        problem = error.errors()[0]
        raise CheckpointError(f"{file}: {problem['loc'][0]}: {problem['msg']}") from error
    return defaults
