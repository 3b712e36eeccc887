"""Puts an engine together: first the plan, on paper; then the parts, on the engine's thread."""

from dataclasses import dataclass

import mlx.core as mx

import metal_ext
from engine.checkpoint import Checkpoint
from engine.loop import Emit, EngineLoop, LoopOptions
from engine.machine import MachineMemory, machine_threads
from engine.planning.shape import ModelShape
from engine.runner import Model, ModelRunner
from engine.scheduler import Scheduler
from engine.token_budget import TokenBudget
from engine.types import EngineLimits
from engine.weights import (
    Arithmetic,
    ArithmeticChoice,
    Progress,
    choose_arithmetic,
    load_qwen3,
)
from kvcache.backend import dense_backend, posix_backend, raise_descriptor_limit
from kvcache.layout import KVShape
from kvcache.manager import KVCacheManager
from kvcache.memory_budget import CacheLimits, CacheRequest, MemoryDemand, MemoryPlan, fit

FLOAT32_BYTES = 4
# Copies of the hidden state and of the logits that live at once during a step: a bound, not a
# measurement.
HIDDEN_COPIES = 6
LOGIT_COPIES = 5
WARM_UP_PROMPT_TOKENS = 64
FIRST_BUDGET_TOKENS = 64
MIN_BUDGET_TOKENS = 16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every choice that the engine leaves to its user; None means: choose."""

    substrate: str
    """"auto", "posix" or "dense"."""
    arithmetic: Arithmetic | None
    kv_dtype: str | None
    """"bfloat16" or "float32"."""
    page_bytes: int | None
    heap_bytes: int
    kv_budget_bytes: int | None
    free_slack_bytes: int
    headroom_bytes: int | None
    mlx_cache_bytes: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    step_time_target_ms: float
    threads: int | None
    idle_release_s: float
    prefix_cache: bool
    prefix_keep_s: float
    max_sharers: int
    check_every_step: bool


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What will be built, as far as it can be said before a byte is allocated."""

    checkpoint: Checkpoint
    arithmetic: ArithmeticChoice
    substrate: str
    memory: MemoryPlan
    threads: int


def plan_engine(config: EngineConfig, checkpoint: Checkpoint, machine: MachineMemory) -> EnginePlan:
    """Fits the model and its cache into the machine.

    Raises BudgetError or LayoutError with the figure that does not fit.
    """
    headroom = headroom_bytes(config, machine.total_bytes)
    usable = min(machine.total_bytes - headroom, machine.available_bytes)
    arithmetic = choose_arithmetic(
        checkpoint, on_gpu=False, memory_bytes=usable // 2, asked=config.arithmetic
    )
    demand = MemoryDemand(
        machine_bytes=machine.total_bytes,
        available_bytes=machine.available_bytes,
        headroom_bytes=headroom,
        weights_bytes=arithmetic.weights_bytes,
        activation_bytes=activation_bytes(checkpoint, config),
        mlx_cache_bytes=config.mlx_cache_bytes,
    )
    substrate = "posix" if config.substrate == "auto" else config.substrate
    request = CacheRequest(
        substrate=substrate,
        heap_bytes=config.heap_bytes,
        max_num_seqs=config.max_num_seqs,
        page_bytes=config.page_bytes,
        kv_budget_bytes=config.kv_budget_bytes,
        max_model_len=config.max_model_len,
    )
    memory = fit(
        demand,
        request,
        kv_shape(config, checkpoint),
        model_max_len=checkpoint.max_position_embeddings,
        system_page_bytes=metal_ext.SYSTEM_PAGE_BYTES,
    )
    threads = config.threads or machine_threads()
    return EnginePlan(checkpoint, arithmetic, substrate, memory, threads)


def headroom_bytes(config: EngineConfig, total_bytes: int) -> int:
    """What is left to other programs: as configured, or a fifth of the memory."""
    return total_bytes // 5 if config.headroom_bytes is None else config.headroom_bytes


def kv_shape(config: EngineConfig, checkpoint: Checkpoint) -> KVShape:
    """K and V as wide as the checkpoint: float32 for a float32 one, bfloat16 for 16 bits."""
    dtype = config.kv_dtype or ("float32" if checkpoint.dtype == "F32" else "bfloat16")
    return KVShape(
        num_layers=checkpoint.num_layers,
        kv_heads=checkpoint.kv_heads,
        head_dim=checkpoint.head_dim,
        itemsize=4 if dtype == "float32" else 2,
    )


def activation_bytes(model: Checkpoint | ModelShape, config: EngineConfig) -> int:
    """An upper bound of what one step computes with, in float32."""
    heads = model.query_heads + 2 * model.kv_heads
    per_token = (
        HIDDEN_COPIES * model.hidden_size + 3 * model.intermediate_size + 4 * heads * model.head_dim
    )
    per_row = LOGIT_COPIES * model.vocab_size
    floats = config.max_num_batched_tokens * per_token + config.max_num_seqs * per_row
    return floats * FLOAT32_BYTES


def build_engine(
    plan: EnginePlan, config: EngineConfig, progress: Progress, emit: Emit
) -> EngineLoop:
    """Makes everything, on the calling thread, which owns MLX from then on."""
    mx.set_default_device(mx.Device(mx.cpu))
    mx.set_cache_limit(config.mlx_cache_bytes)
    model = load_qwen3(plan.checkpoint, plan.arithmetic.arithmetic, progress)
    identity = repr((plan.checkpoint, plan.arithmetic.arithmetic)).encode()
    return assemble(
        plan.memory,
        config,
        model,
        plan.checkpoint.vocab_size,
        plan.substrate,
        plan.threads,
        identity,
        emit,
    )


def assemble(
    memory: MemoryPlan,
    config: EngineConfig,
    model: Model,
    vocab_size: int,
    substrate: str,
    threads: int,
    identity: bytes,
    emit: Emit,
) -> EngineLoop:
    """The engine around any model; runs a first request through it.

    identity: of the model, whose K and V no other model shares.
    """
    raise_descriptor_limit()
    workers = metal_ext.CpuWorkers(threads)
    if metal_ext.fast_blas is not None:
        metal_ext.fast_blas.use(workers)
    make_backend = dense_backend if substrate == "dense" else posix_backend
    cache_limits = CacheLimits(
        budget_bytes=memory.kv_budget_bytes,
        max_sequences=memory.max_num_seqs,
        free_slack_bytes=config.free_slack_bytes,
        max_sharers=config.max_sharers,
        shares_prefixes=config.prefix_cache,
    )
    backend = make_backend(memory.layout.group)
    kv = KVCacheManager(memory.layout, backend, cache_limits, identity=identity, workers=workers)
    limits = EngineLimits(
        max_model_len=min(memory.max_model_len, kv.max_tokens),
        max_num_seqs=memory.max_num_seqs,
        vocab_size=vocab_size,
    )
    most = config.max_num_batched_tokens
    budget = TokenBudget(
        target_s=config.step_time_target_ms / 1000,
        minimum=min(MIN_BUDGET_TOKENS, most),
        maximum=most,
        tokens=min(FIRST_BUDGET_TOKENS, most),
    )
    loop = EngineLoop(
        Scheduler(kv, limits, budget, most),
        kv,
        ModelRunner(model, kv),
        LoopOptions(config.idle_release_s, config.prefix_keep_s, config.check_every_step),
        emit=emit,
    )
    loop.warm_up(max(1, min(WARM_UP_PROMPT_TOKENS, limits.max_model_len - 2)))
    return loop
