"""Builds an engine: plans its memory first, then creates its parts on the engine's thread."""

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import mlx.core as mx

import metal_ext
from engine.config import Activations, EngineConfig
from engine.figures import MlxMemory
from engine.journal import Journal
from engine.machine import MachineMemory, machine_threads
from engine.models.checkpoint import Checkpoint
from engine.models.identity import ModelIdentity
from engine.models.mlx_ops import FEW_ROWS, MlxOps
from engine.models.spec import ModelSpec
from engine.models.weights import Progress, compute_itemsize, load_model
from engine.planning.memory import Q4, memory_demand
from engine.step.draft_check import COMPANY, TOO_SMALL, DraftCheck, DraftFaultError
from engine.step.draft_head import DraftHead, DraftModel
from engine.step.drafts import Drafter, Drafts
from engine.step.loop import WARM_UP_TOKENS, Emit, EngineLoop
from engine.step.row_costs import CostsFile, RowCosts
from engine.step.runner import Model, ModelRunner
from engine.step.scheduler import Scheduler
from engine.step.token_budget import ALONE_TARGETS, CALM_FRACTION, GPU_TILE_ROWS, TokenBudget
from engine.types import EngineLimits
from kvcache.backends.choice import KVBackend, KVBackendChoice
from kvcache.backends.new import new_backends, new_states
from kvcache.budget import (
    BudgetError,
    CacheLimits,
    CacheRequest,
    MemoryDemand,
    MemoryPlan,
    fit,
    gib,
    smallest_context,
)
from kvcache.layout import KVFormat, KVShape, LayoutError
from kvcache.manager import KVCacheManager
from kvcache.tier.store import RecordStore, TierLimits, usual_held_bytes
from kvcache.user_folders import prefixes_folder

log = logging.getLogger(__name__)

FIRST_BUDGET_TOKENS = 64
MIN_BUDGET_TOKENS = 16
# A GPU compiles each variant of a kernel at its first use, in up to 0.2 s. So its warm-up also runs
# several sequences at once, whose prompts fill no tile; and a prompt with a step of MANY_ROWS, then
# one of LAST_ROWS, and an answer whose attention combines partial sums.
WARM_UP_SEQUENCES, SHORT_PROMPT_TOKENS = 8, 9
MANY_ROWS, LAST_ROWS = 512, 5
# If MANY_ROWS would take longer, no step has as many. macOS stops work that holds up the display.
LONGEST_WARM_UP_S = 1.0
# The GPU's kernels are compiled for these dimensions of attention heads and of delta net heads.
GPU_HEAD_DIMS = (64, 128, 256)
GPU_DELTA_DIM = 128
# Weights whose hashes take longer, as no earlier start has kept them, are loaded meanwhile.
DIGEST_WAIT_S = 1.0
# 4-bit weights are suggested only if they take less than this fraction of the current weights.
SMALLER = 0.9


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The parts of an engine, chosen before any memory is allocated."""

    checkpoint: Checkpoint
    kv_backend: KVBackendChoice
    memory: MemoryPlan
    threads: int
    instruction_set: str
    activations: Activations
    """Never "auto"."""
    drafts: bool
    """Whether the engine is to draft tokens."""
    config: EngineConfig
    machine: MachineMemory

    @property
    def on_gpu(self) -> bool:
        return self.kv_backend.kv_backend.on_gpu

    @property
    def arithmetic(self) -> str:
        """Return a name for the way to multiply weights. The model's digest includes this name."""
        if self.on_gpu:
            return "stored"
        return "packed" if self.activations == "float32" else f"packed, x in {self.activations}"

    @property
    def warnings(self) -> tuple[str, ...]:
        tight = self.memory.warning
        return (*self.kv_backend.warnings, *([] if tight is None else [tight]))

    def lines(self) -> list[str]:
        """Return the lines of a text that describes the plan to people, without the warnings."""
        choice = self.kv_backend
        if self.on_gpu:
            why, products = "the GPU multiplies what is stored", "quire's own of few rows, MLX's"
        else:
            why, products = "the CPU's own kernels multiply what is stored", "quire's own"
        return [
            *self.memory.lines(),
            f"arithmetic: {self.arithmetic} ({why}); matrix products: {products}",
            self.device,
            f"drafts: {self.draft_source}",
            *(f"  {reason}" for reason in choice.reasons if reason not in choice.warnings),
        ]

    @property
    def draft_source(self) -> str:
        """Return what drafts tokens, in words."""
        if not self.drafts:
            return "off"
        source, where = "of text", "".join(f" ({file})" for file in self.checkpoint.draft_files[:1])
        if self.checkpoint.spec.draft is not None:
            source = f"of text, and by the model's head{where}"
        return f"{source}, if the start finds that they change no answer" * self.on_gpu or source

    @property
    def device(self) -> str:
        kernels = "Metal"
        if not self.on_gpu:
            kernels = f"{self.instruction_set}, {self.threads} threads"
        return f"KV backend: {self.kv_backend.kv_backend}; kernels: {kernels}"


def plan_engine(
    config: EngineConfig, checkpoint: Checkpoint, machine: MachineMemory, choice: KVBackendChoice
) -> EnginePlan:
    """Plan the model and its cache. ``machine`` is the memory of the CPU or GPU that computes.
    Raises BudgetError or LayoutError with a message that names the number that does not fit."""
    problem = unserved(checkpoint.spec, choice.kv_backend)
    if problem is not None:
        raise LayoutError(f"{problem}: serve it with --kv-backend posix")
    known = metal_ext.instruction_sets()
    chosen_set = known[0] if config.instruction_set == "auto" else config.instruction_set
    activations = config.activations
    if activations == "auto":
        activations = choose_activations(
            chosen_set, checkpoint.dtype, quantised=checkpoint.quantized
        )
    if config.instruction_set not in ("auto", *known):
        raise LayoutError(
            f"engine.instruction_set is {config.instruction_set!r}, and this machine has "
            f"{', '.join(known)}; auto takes the first"
        )
    return EnginePlan(
        checkpoint,
        choice,
        plan_memory(config, checkpoint, machine, choice.kv_backend),
        config.threads or machine_threads(),
        chosen_set,
        activations,
        config.drafts and not checkpoint.embeds,
        config,
        machine,
    )


def choose_activations(instruction_set: str, dtype: str, *, quantised: bool) -> Activations:
    """Choose how a CPU rounds activations, for a checkpoint of ``dtype``. With AMX, int8 is not
    faster than float32. Only the instruction set "bf16" multiplies bfloat16. `make quality`
    compares the loss of quality with mlx-lm's."""
    if quantised:
        return "float32" if instruction_set == "amx" else "int8"
    return "bfloat16" if (instruction_set, dtype) == ("bf16", "BF16") else "float32"


def unserved(spec: ModelSpec, kv_backend: KVBackend) -> str | None:
    """Return the reason why the backend's device cannot run the model, or None if it can."""
    if not kv_backend.on_gpu:
        return None
    if unknown := {attention.head_dim for attention in spec.attentions}.difference(GPU_HEAD_DIMS):
        known = ", ".join(map(str, GPU_HEAD_DIMS))
        return f"the model's head_dim is {min(unknown)}, and the GPU's kernels know {known}"
    dims = {dim for net in spec.recurrences for dim in (net.key_dim, net.value_dim)}
    if others := dims.difference((GPU_DELTA_DIM,)):
        return (
            f"the model's gated delta nets have heads of {min(others)} dimensions, and the GPU's "
            f"kernels know {GPU_DELTA_DIM}"
        )
    return None


def plan_memory(
    config: EngineConfig, checkpoint: Checkpoint, machine: MachineMemory, kv_backend: KVBackend
) -> MemoryPlan:
    """Plan the memory of an engine. Raises the errors of ``plan_engine``."""
    spec = checkpoint.spec
    shape = kv_shape(config, checkpoint, kv_backend)
    if checkpoint.embeds:
        config = replace(config, grammar_bytes=0)
    itemsize = compute_itemsize(checkpoint.dtype, on_gpu=kv_backend.on_gpu)
    weights = checkpoint.stored_bytes if kv_backend.on_gpu else checkpoint.packed_bytes
    request = CacheRequest(
        kv_backend=kv_backend,
        settings=config,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_buffer_bytes=machine.max_buffer_bytes,
        address_bytes=machine.address_bytes,
    )
    least = smallest_context(config.max_model_len, spec.max_position_embeddings)
    # Activations grow with the limits, and the limits with the memory that activations leave: plan
    # for few activations, then for those of the limits that were found.
    context, sequences = least, 1
    while True:
        limited = replace(config, max_model_len=context, max_num_seqs=sequences)
        demand = memory_demand(spec, limited, machine, shape, kv_backend, itemsize, weights)
        # A user who sets the bytes for K and V may use the headroom for other programs, too.
        room = demand.usable_bytes if config.kv_budget_bytes is None else demand.machine_bytes
        if weights > room:
            needed = demand.fixed_bytes + shape.bytes_of(least)
            raise BudgetError(_too_large(checkpoint, demand, room, needed))
        plan = fit(
            demand,
            request,
            shape,
            model_max_len=spec.max_position_embeddings,
            system_page_bytes=metal_ext.SYSTEM_PAGE_BYTES,
        )
        if plan.max_model_len <= context and plan.max_num_seqs <= sequences:
            return plan
        context = max(context, plan.max_model_len)
        sequences = max(sequences, plan.max_num_seqs)


def _too_large(checkpoint: Checkpoint, demand: MemoryDemand, room: int, least: int) -> str:
    """Return an error message for weights that exceed ``room`` bytes. The whole model needs
    ``least`` bytes with the shortest context."""
    packed, others = Q4.bytes_of(checkpoint.num_weights), demand.fixed_bytes - demand.weights_bytes
    hint = "serve a smaller model"
    if packed < SMALLER * demand.weights_bytes:
        if packed + others < room:
            hint = f"in MLX's 4 bits its weights would take {gib(packed)}, and fit"
        else:
            hint = f"in MLX's 4 bits its weights would still take {gib(packed)}: {hint}"
    if least <= replace(demand, headroom_bytes=0).usable_bytes:
        hint += f"; or lower --headroom, which is {gib(demand.headroom_bytes)}"
    return (
        f"the weights alone take {gib(demand.weights_bytes)}, of {gib(room)} that are usable here, "
        f"and the model needs {gib(demand.fixed_bytes)} before the first token of K and V; {hint}"
    )


def kv_shape(config: EngineConfig, checkpoint: Checkpoint, kv_backend: KVBackend) -> KVShape:
    """Return the shape of the cache. The default dtype is the checkpoint's, but on a CPU bfloat16
    replaces float16. Raises LayoutError if float16 is configured for a CPU."""
    names = {"F32": "float32", "F16": "float16" if kv_backend.on_gpu else "bfloat16"}
    stored = names.get(checkpoint.dtype, "bfloat16")
    dtype = stored if config.kv_dtype == "auto" else config.kv_dtype
    if dtype == "float16" and not kv_backend.on_gpu:
        raise LayoutError("a CPU keeps K and V as bfloat16 or float32, and cache.dtype is float16")
    computed = KVFormat(stored) if kv_backend.on_gpu else KVFormat.FLOAT32
    return checkpoint.spec.kv_shape(KVFormat(dtype), computed)


def build_engine(
    plan: EnginePlan, config: EngineConfig, progress: Progress, emit: Emit, key: bytes = b""
) -> EngineLoop:
    """Build the engine on the calling thread. Afterwards only this thread may use MLX. A GPU's
    engine remembers requests at its failures by digests under ``key``; b"" remembers none. If its
    drafts would change answers, now or at an earlier start, the model's head is left out."""
    identity, fault = identity_of(plan.checkpoint), ""
    if plan.on_gpu and plan.checkpoint.spec.draft and identity.is_known(DIGEST_WAIT_S):
        fault = costs_file(plan, identity).read()[2]
    if not fault:
        try:
            return _build(plan, identity, config, progress, emit, key)
        except DraftFaultError as error:
            fault = str(error)
        gc.collect()  # or else cycles keep the weights
        if fault != TOO_SMALL:  # which is about the settings
            costs_file(plan, identity).write({}, {}, fault)
    plain = plan.checkpoint.without_draft_head(f"they might change answers: {fault}")
    log.info(plain.left_out)
    plan = plan_engine(plan.config, plain, plan.machine, plan.kv_backend)
    return _build(plan, identity_of(plain), config, progress, emit, key)


def identity_of(checkpoint: Checkpoint) -> ModelIdentity:
    return ModelIdentity(checkpoint.path, checkpoint.draft_files if checkpoint.spec.draft else None)


def costs_file(plan: EnginePlan, identity: ModelIdentity) -> CostsFile:
    way = f"{plan.device}; {plan.config.kv_dtype}, {min(COMPANY, plan.memory.max_num_seqs)} at once"
    return CostsFile(identity.digest(plan.arithmetic), way)


def _build(
    plan: EnginePlan,
    identity: ModelIdentity,
    config: EngineConfig,
    progress: Progress,
    emit: Emit,
    key: bytes,
) -> EngineLoop:
    mx.set_default_device(compute_device(plan.kv_backend.kv_backend))
    mx.set_cache_limit(config.mlx_cache_bytes)
    if plan.on_gpu:
        # MLX holds the arrays of ten command buffers until they have run, 2 to 3 GiB in a long
        # prompt. Beyond this limit it waits for the GPU, and refuses nothing (mlx/transforms.cpp).
        kept_bytes = plan.memory.kv_budget_bytes + plan.memory.state_bytes
        mx.set_memory_limit(plan.memory.demand.machine_bytes - kept_bytes)
    workers = None
    if not plan.on_gpu:
        workers = metal_ext.CpuWorkers(plan.threads, plan.instruction_set, plan.activations)
    model = load_model(plan.checkpoint, progress, workers)
    if config.kv_dtype == "float16" and plan.checkpoint.dtype != "F16":
        assert isinstance(model.ops, MlxOps), "a CPU keeps no float16"
        model.ops.require_float16_suffices()
    digest = identity.digest(plan.arithmetic)
    journal = Journal(plan.kv_backend.kv_backend, digest, key)
    # Memory is planned for all that is configured: what a gentler engine spares stays free.
    config, warning = journal.gentler(config)
    if warning:
        log.warning(warning)
    loop = assemble(
        plan.memory,
        config,
        model,
        plan.checkpoint.vocab_size,
        plan.kv_backend,
        workers,
        digest,
        emit,
        embedding_size=plan.checkpoint.spec.hidden_size if plan.checkpoint.embeds else None,
        weights=model.weights,
        journal=journal,
        costs=RowCosts(costs_file(plan, identity)),
        draft_model=None if plan.checkpoint.spec.draft is None else model,
    )
    store = open_records(config) if loop.limits.shared_block_tokens is not None else None
    if store is not None:
        kernels = "Metal" if plan.on_gpu else plan.instruction_set
        loop.use_disk(store, f"{kernels}, MLX {version('mlx')}", str(plan.checkpoint.path))
    return loop


def open_records(config: EngineConfig) -> RecordStore | None:
    """Return the prefixes in files, or None if they are off, or the folder cannot be used."""
    if config.disk_bytes == 0:
        log.info("prefixes on disk: off (cache.disk is 0)")
        return None
    try:
        folder = prefixes_folder(config.disk_folder)
        held = usual_held_bytes(folder) if config.disk_bytes is None else config.disk_bytes
        store = RecordStore(folder, TierLimits(held, per_hour=config.disk_hourly_bytes))
        store.shrink()
        held_now = gib(store.held_bytes)
        log.info("prefixes on disk: %s, at most %s, %s held", folder, gib(held), held_now)
        return store
    except (OSError, RuntimeError) as error:  # a RuntimeError: there is no home folder
        log.warning("prefixes on disk: off (%s)", error)
        return None


def compute_device(kv_backend: KVBackend) -> mx.Device:
    return mx.Device(mx.gpu if kv_backend.on_gpu else mx.cpu)


def assemble(
    memory: MemoryPlan,
    config: EngineConfig,
    model: Model,
    vocab_size: int,
    choice: KVBackendChoice,
    workers: metal_ext.CpuWorkers | None,
    identity: bytes,
    emit: Emit,
    *,
    embedding_size: int | None = None,
    weights: Sequence[mx.array] = (),
    journal: Journal | None = None,
    costs: RowCosts | None = None,
    draft_model: DraftModel | None = None,
) -> EngineLoop:
    """Return an engine for ``model`` after a warm-up request.

    ``workers`` is None on a GPU. ``identity`` is the model's digest: only models with equal digests
    share K and V. ``embedding_size`` is None for a model that generates text. A GPU keeps
    ``weights`` resident. ``draft_model`` is the model if it has a head for drafts. Raises
    RuntimeError if memory cannot be mapped or the warm-up fails, and the error of ``new_drafter``.
    """
    on_gpu = choice.kv_backend.on_gpu
    backends = new_backends(
        choice.kv_backend,
        memory.layout.groups,
        max_buffers=memory.max_buffers,
        release_heaps=choice.releases_heaps,
        maps_while_running=choice.maps_while_running,
        workers=workers,
        residency_keep_s=config.residency_keep_s,
        weights=weights,
    )
    cache_limits = CacheLimits(
        memory.kv_budget_bytes,
        memory.max_num_seqs,
        memory.max_buffers,
        config,
        config.max_num_batched_tokens,
    )
    shares = config.prefix_cache and backends[0].shares_blocks
    states = new_states(memory.layout.shape.slot, memory.num_slots, backends[0], workers)
    kv = KVCacheManager(memory.layout, backends, cache_limits, identity=identity, states=states)
    limits = EngineLimits(
        max_model_len=min(memory.max_model_len, kv.max_tokens),
        max_num_seqs=memory.max_num_seqs,
        vocab_size=vocab_size,
        embedding_size=embedding_size,
        shared_block_tokens=memory.layout.tokens_per_block if shares else None,
        keeps_states=states is not None,
    )
    costs = RowCosts() if costs is None else costs
    scheduler = new_scheduler(kv, limits, config, on_gpu=on_gpu)
    pools = embedding_size is not None
    loop = EngineLoop(
        scheduler,
        kv,
        ModelRunner(model, kv, pools=pools, workers=workers, takes_whole_steps=on_gpu),
        config,
        emit=emit,
        mlx_memory=mlx_memory,
        journal=journal,
        costs=costs,
    )
    try:
        loop.warm_up([max(1, min(FIRST_BUDGET_TOKENS, limits.max_model_len - 2))])
        if on_gpu:
            scheduler.budget = warm_up_gpu(loop, scheduler, config)
        head = None if draft_model is None else DraftHead(draft_model, kv, workers)
        check = DraftCheck(model, kv, vocab_size) if on_gpu else None
        scheduler.drafter = new_drafter(limits, config, costs, head, check)
    except BaseException:
        loop.close()
        raise
    return loop


def new_scheduler(
    kv: KVCacheManager, limits: EngineLimits, config: EngineConfig, *, on_gpu: bool
) -> Scheduler:
    budget = first_budget(config, GPU_TILE_ROWS if on_gpu else 1)
    return Scheduler(
        kv,
        limits,
        budget,
        config.max_num_batched_tokens,
        config.max_step_mask_s,
        max_draft_rows=FEW_ROWS if on_gpu else None,
    )


def new_drafter(
    limits: EngineLimits,
    config: EngineConfig,
    costs: RowCosts,
    head: DraftHead | None,
    check: DraftCheck | None,
) -> Drafter | None:
    """Return the engine's source of drafts, or None if drafts are off. A GPU needs a ``check``.
    Raises DraftFaultError if there is a ``head`` of no use."""
    if not config.drafts or limits.embedding_size is not None:
        return None
    fault = "" if check is None else check.fault(limits.max_num_seqs, FEW_ROWS)
    if fault and head is not None:
        raise DraftFaultError(fault)
    if fault:
        log.info("drafts are off, because they would change answers: %s", fault)
        return None
    return Drafts(costs, head)


def first_budget(
    config: EngineConfig, tile: int = 1, tokens: int = FIRST_BUDGET_TOKENS
) -> TokenBudget:
    """Return a new engine's limit of prompt tokens, which starts near ``tokens``. The device
    computes ``tile`` rows together."""
    maximum = config.max_num_batched_tokens
    return TokenBudget(
        target_s=config.step_time_target_ms / 1000,
        minimum=min(MIN_BUDGET_TOKENS, maximum),
        maximum=maximum,
        tokens=min(max(MIN_BUDGET_TOKENS, tokens), maximum),
        tile=tile,
    )


def warm_up_gpu(loop: EngineLoop, scheduler: Scheduler, config: EngineConfig) -> TokenBudget:
    """Use all variants of kernels that serving uses, which compiles them. Return a token budget
    that starts by the measured time of a step."""
    longest = max(1, loop.limits.max_model_len - 2)
    limit = min(longest, config.max_num_batched_tokens)
    limit = limit // GPU_TILE_ROWS * GPU_TILE_ROWS or limit
    rows, many = min(FIRST_BUDGET_TOKENS, limit), min(MANY_ROWS, limit)

    def run(prompts: list[int], answer_tokens: int = WARM_UP_TOKENS) -> float:
        scheduler.budget = first_budget(config, GPU_TILE_ROWS, rows)
        return loop.warm_up(prompts, answer_tokens)

    if run([rows], 1) * many <= LONGEST_WARM_UP_S * rows:
        rows = many
    for sequences in (2, WARM_UP_SEQUENCES):
        run([min(SHORT_PROMPT_TOKENS, rows)] * min(sequences, loop.limits.max_num_seqs))
    run([min(MANY_ROWS + LAST_ROWS, longest)])
    target_rows = CALM_FRACTION * config.step_time_target_ms / 1000 * rows / run([rows], 1)
    budget = first_budget(config, GPU_TILE_ROWS, int(target_rows))
    budget.alone = first_budget(config, GPU_TILE_ROWS, int(ALONE_TARGETS * target_rows)).tokens
    return budget


def mlx_memory() -> MlxMemory:
    """Return the memory that MLX holds now. Call this on the thread that owns MLX."""
    return MlxMemory(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())
