"""Put the parts together: settings -> port -> plan -> tokenizer -> weights -> engine -> uvicorn.

Everything that can be wrong with settings and model is said before a weight is fetched or loaded,
and before anybody can connect, as one sentence.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import metal_ext  # before anything that imports MLX: it loads the BLAS

import structlog
from tqdm import tqdm

from engine.build import EnginePlan, build_engine
from engine.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from engine.config import EngineConfig
from engine.client import EngineClient
from engine.machine import machine_memory, raise_descriptor_limit
from engine.monitor import EngineMonitor
from engine.pressure import pressure_source
from engine.promised_checkpoint import promised_checkpoint
from engine.substrate import plan_for_this_machine
from engine.weights import Arithmetic
from kvcache.canary.footprint import footprint_with
from kvcache.choice import SubstrateError
from kvcache.layout import LayoutError
from kvcache.memory_budget import BudgetError, gib
from server.config import Config, Tables
from server.drained_server import listen
from server.startup_errors import ModelError, SettingError, engine_error
from server.guards.access import check_access
from server.hub import (
    ModelNotFoundError,
    SamplingDefaultsError,
    find_model,
    model_names,
    sampling_defaults,
)
from server.idle_memory import keep_what_is_there, use_one_arena
from server.listener import reserve
from server.log import configure_log
from server.metrics import Metrics
from server.metrics.registry import About
from server.service import ServedModel, Service
from server.settings import read_settings
from server.text.grammar.compiler import GrammarCompiler, GrammarLimits
from server.text.grammar.judge import Judge, JudgeLimits
from server.text.grammar.vocabulary import Vocabulary
from server.text.reasoning_cache import ReasoningCache
from server.text.tokenizer import Tokenizer, TokenizerError
from server.text.calls.written import WrittenCalls

STOP_TIMEOUT_S = 30.0
EMBEDS = {"auto": None, "generate": False, "embed": True}

log = structlog.get_logger("quire")


def serve_model(name: str, file: Path | None, flags: Tables) -> None:
    """Serve until told to end. Raises StartError."""
    use_one_arena()
    raise_descriptor_limit()  # the engine's heaps are the first that need it
    settings = read_settings(file, flags)
    configure_log(settings.log)
    check_access(settings)
    with reserve(settings.server.host, settings.server.port) as listener:
        serve_on(listener, settings, read_model(name, settings))


def serve_on(listener: socket.socket, settings: Config, model: "ModelFiles") -> None:
    """Load the weights and let clients in. Raises StartError."""
    client = start_engine(settings, model.plan)
    checkpoint = model.plan.checkpoint
    grammars = grammar_compiler(settings, model.tokenizer, model.served, checkpoint.vocab_size)
    if not checkpoint.embeds and (warning := grammars.load()):
        log.warning(warning)
    monitor = EngineMonitor(
        client,
        watchdog_s=settings.engine.watchdog_s,
        exit_code=lambda: engine_error(model.plan.on_gpu and client.substrate_failed).exit_code,
        pressure=pressure_source() if settings.cache.heed_pressure else None,
    )
    monitor.start()
    try:
        calls = WrittenCalls(settings.limits.max_written_call_bytes)
        reasoning_cache = ReasoningCache(settings.limits.max_thought_bytes)
        metrics = make_metrics(settings, model.served, client, model.plan)
        service = Service(
            settings,
            model.served,
            model.tokenizer,
            client,
            metrics,
            grammars,
            calls,
            reasoning_cache,
        )
        keep_what_is_there()
        listen(settings, service, listener)
        if not client.alive:
            raise engine_error(model.plan.on_gpu and client.substrate_failed)
    finally:
        if not client.stop(STOP_TIMEOUT_S):
            log.error("the engine did not end in time: its memory is left to the system")
        monitor.stop()
    log.info("ended")


# --- the plan ----------------------------------------------------------------------------------


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


# --- the model's files -----------------------------------------------------------------------


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


def grammar_compiler(
    settings: Config, tokenizer: Tokenizer, model: ServedModel, vocab_size: int
) -> GrammarCompiler:
    """Make the compiler of constraints; it reads the tokenizer when it is needed."""
    limits = settings.limits
    judge_limits = JudgeLimits(
        limits.max_grammar_compile_s, limits.max_grammar_memory, limits.max_mask_s
    )
    return GrammarCompiler(
        Vocabulary(tokenizer, vocab_size, model.stop_token_ids),
        lambda made: Judge(made.text, made.facts, judge_limits),
        GrammarLimits(
            max_bytes=limits.max_grammar_bytes,
            max_memory_bytes=limits.max_cached_grammar_memory,
            max_cached=limits.max_cached_grammars,
            max_mask_s=limits.max_mask_s,
            max_begun_s=limits.max_grammar_compile_s,
        ),
    )


# --- engine and server -----------------------------------------------------------------------


def start_engine(settings: Config, engine_plan: EnginePlan) -> EngineClient:
    """Start the engine, loaded and warm. Raises EngineError."""
    bar = tqdm(
        unit="B", unit_scale=True, unit_divisor=1024, desc="loading", disable=None, leave=False
    )

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    client = EngineClient(
        lambda emit: build_engine(engine_plan, engine_config(settings), progress, emit),
        max_queue=settings.limits.max_queued_requests,
        max_backlog=settings.limits.max_stream_backlog_events,
        max_share_ratio=(
            settings.limits.max_key_share_ratio if len(settings.access.api_keys) > 1 else 1.0
        ),
    )
    try:
        client.start()
    except Exception as error:
        log.debug("the engine did not start", exc_info=True)
        lost = engine_plan.on_gpu and client.substrate_failed
        raise engine_error(lost, f"the engine did not start: {error}") from error
    finally:
        bar.close()
    return client


def make_metrics(
    settings: Config, model: ServedModel, client: EngineClient, engine_plan: EnginePlan
) -> Metrics:
    """Make the metrics of this server."""
    about = About(
        model=model.id,
        substrate=engine_plan.substrate.substrate.setting,
        arithmetic=engine_plan.arithmetic.arithmetic.value,
        max_model_len=engine_plan.memory.max_model_len,
    )

    def memory() -> tuple[int, int]:
        found = machine_memory()
        return found.total_bytes, found.available_bytes

    names = settings.metrics.vllm_names
    return Metrics(client, about, vllm_names=names, footprint=footprint_with, memory=memory)
