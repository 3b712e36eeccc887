"""A model's files: checked against the settings and this machine before a weight is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import metal_ext  # before anything that imports MLX: it loads the BLAS

import structlog

from engine.build import EnginePlan
from engine.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from engine.config import EngineConfig
from engine.promised_checkpoint import promised_checkpoint
from engine.substrate import plan_for_this_machine
from engine.weights import Arithmetic
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
from server.config import Config, SettingError, StartError
from server.text.tokenizer import Tokenizer, TokenizerError

EMBEDS = {"auto": None, "generate": False, "embed": True}

log = structlog.get_logger("quire")


class ModelError(StartError):
    """A model that cannot be served."""

    exit_code = 3


def engine_config(settings: Config) -> EngineConfig:
    """Return the settings in the engine's form."""
    engine, cache = settings.engine, settings.cache
    return EngineConfig(
        substrate=cache.substrate,
        release_heaps=cache.release_heaps,
        residency_keep_s=engine.residency_keep_s,
        arithmetic=None if engine.arithmetic == "auto" else Arithmetic(engine.arithmetic),
        kv_dtype=None if cache.dtype == "auto" else cache.dtype,
        page_bytes=cache.page_size,
        heap_bytes=cache.heap_size,
        kv_budget_bytes=cache.kv_budget,
        free_slack_bytes=cache.free_slack,
        headroom_bytes=cache.headroom,
        mlx_cache_bytes=engine.mlx_cache_bytes,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        step_time_target_ms=engine.step_time_target_ms,
        threads=engine.threads,
        idle_release_s=cache.idle_release_s,
        prefix_cache=cache.prefix_cache,
        prefix_keep_s=cache.prefix_keep_s,
        max_sharers=cache.max_sharers,
        check_every_step=engine.check_every_step,
        max_step_mask_s=settings.limits.max_step_mask_s,
        grammar_bytes=settings.limits.max_cached_grammar_memory,
        overlap=engine.overlap,
    )


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
        tokenizer = Tokenizer(
            folder, interpret_special_tokens=settings.prompts.interpret_special_tokens
        )
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
    for line in engine_plan.warnings:
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
