"""A model's files: checked against the settings and this machine before a weight is loaded."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from engine.build import EnginePlan
from engine.models.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from engine.models.promised_checkpoint import promised_checkpoint
from engine.substrate import plan_for_this_machine
from kvcache.choice import SubstrateError
from kvcache.layout import LayoutError
from kvcache.memory_budget import BudgetError, gib
from server.chat.served_model import ServedModel
from server.cli.hub import (
    ModelNotFoundError,
    SamplingDefaultsError,
    find_model,
    model_names,
    sampling_defaults,
)
from server.config import Config, SettingError, StartError, engine_config, without_effect
from server.text.tokenizer import Tokenizer, TokenizerError

EMBEDS = {"auto": None, "generate": False, "embed": True}

log = structlog.get_logger("quire")


class ModelError(StartError):
    """A model that cannot be served."""

    exit_code = 3


def make_plan(settings: Config, checkpoint: Checkpoint) -> EnginePlan:
    """Fit model and cache into this machine. Raises SettingError with the figure that does not."""
    try:
        return plan_for_this_machine(engine_config(settings), checkpoint)
    except (BudgetError, LayoutError, SubstrateError) as error:
        raise SettingError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model whose files have been found complete."""

    plan: EnginePlan
    tokenizer: Tokenizer
    served: ServedModel


def read_model(name: str, settings: Config) -> ModelFiles:
    """Read a model's files. Weights of the hub are fetched once all else is right and they fit into
    this machine. Raises StartError."""
    embeds = EMBEDS[settings.engine.task]
    with model_errors():
        found = find_model(name)
        folder = found.folder
        if found.missing:
            checkpoint = promised_checkpoint(folder, found.weights_bytes, embeds=embeds)
        else:
            checkpoint = read_checkpoint(folder, embeds=embeds)
        engine_plan = make_plan(settings, checkpoint)
        tokenizer = Tokenizer(folder, settings.prompts)
        check_vocabulary(folder, tokenizer, checkpoint)
        served = ServedModel(
            model_names(name, folder, settings.server.served_model_name),
            sampling_defaults(folder),
            frozenset(checkpoint.eos_token_ids or tokenizer.end_ids),
        )
        if not checkpoint.embeds and (warning := tokenizer.template.try_out()):
            log.warning(warning)
        if found.missing:
            log.info(f"downloading {name}: {gib(found.missing_bytes)} of weights")
            found.fetch_weights()
            engine_plan = make_plan(settings, read_checkpoint(folder, embeds=embeds))
    for line in engine_plan.lines():
        log.info(line)
    for line in (*without_effect(settings, os.environ), *engine_plan.warnings):
        log.warning(line)
    return ModelFiles(engine_plan, tokenizer, served)


@contextmanager
def model_errors() -> Iterator[None]:
    """Raise errors of the model's files as ModelError."""
    try:
        yield
    except (ModelNotFoundError, CheckpointError, TokenizerError, SamplingDefaultsError) as error:
        raise ModelError(str(error)) from error


def check_vocabulary(folder: Path, tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
    """Raise ModelError for a tokenizer that has more tokens than the weights."""
    if tokenizer.vocab_size > checkpoint.vocab_size:
        raise ModelError(
            f"{folder / 'tokenizer.json'}: it has {tokenizer.vocab_size} tokens, but config.json's "
            f"vocab_size is {checkpoint.vocab_size}"
        )
