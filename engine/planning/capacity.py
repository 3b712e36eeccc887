"""Makes the capacity report of a model: the weights, contexts and sequences that fit a device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.machine import MachineMemory, gpu_memory
from engine.models.weights import compute_itemsize
from engine.planning.devices import Device
from engine.planning.memory import (
    CONTEXTS,
    WEIGHT_PACKINGS,
    ModelShape,
    Resident,
    kv_shape,
    memory_demand,
    own_packing,
    resident,
)
from kvcache.backends.choice import KVBackend
from kvcache.budget import (
    BudgetError,
    MemoryDemand,
    sequences_within,
    slots_within,
    smallest_context,
)
from kvcache.layout import KVLayout, dense_layout, grouped_layout, paged_layout

CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Room:
    """The memory for sequences that remains beside a model's weights."""

    kv_bytes: int
    """The bytes for K and V, or 0 if the weights alone do not fit."""
    num_slots: int | None = None
    """The number of slots (recurrent states of one sequence at one position), or None if the model
    has no recurrent states."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A named way to allocate memory for K and V, such as quire's own or mlx-lm's."""

    name: str
    layout: KVLayout

    def fit(self, room: Room, tokens: int) -> int:
        """Return the number of sequences of ``tokens`` tokens that fit in ``room``."""
        layout = self.layout
        counts = zip(layout.heap_blocks_within(room.kv_bytes), layout.groups, strict=True)
        by_kv = min(count // group.kept_blocks(tokens) for count, group in counts)
        return by_kv if room.num_slots is None else min(by_kv, sequences_within(room.num_slots))


@dataclass(frozen=True, slots=True)
class Fit:
    """The numbers of sequences that fit in memory with the weights in one packing."""

    resident: Resident
    """The memory of the weights and of one sequence that fills the context."""
    room: Room
    tokens: int
    """The number of tokens whose K and V fit, or 0 if the model cannot be served."""
    whole_context: tuple[int, ...]
    """For each Allocation, how many sequences fit if each fills the context."""
    fifth_context: tuple[int, ...]
    """For each Allocation, how many sequences fit if each fills a fifth of the context."""


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """All figures of the capacity report. K and V are bf16. Quantized weights stay as
    they are stored; for other weights, the report has figures for each of WEIGHT_PACKINGS."""

    shape: ModelShape
    device: Device
    context: int
    demand: MemoryDemand
    """The memory that the model needs in addition to the weights and the cache."""
    by_context: tuple[Resident, ...]
    """For each length in CONTEXTS, the memory of one sequence and the weights (largest packing)."""
    allocations: tuple[Allocation, ...]
    """The dense, the chunked and the sparse allocation, in this order."""
    fifth_tokens: int
    """A fifth of the context, the length of sequences for ``Fit.fifth_context``."""
    fits: tuple[Fit, ...]


def plan_capacity(
    shape: ModelShape, device: Device, context: int, config: EngineConfig
) -> CapacityReport:
    """Return the report for sequences of at most ``context`` tokens, which must be 2 or more.
    Raises LayoutError if the size of a token's K does not divide a page."""
    machine, kv_backend = empty_machine(device)
    demand = memory_demand(
        shape.spec,
        replace(config, max_model_len=context),
        machine,
        kv_shape(shape),
        kv_backend,
        compute_itemsize("BF16", on_gpu=device.on_gpu),
    )
    allocations = allocations_of(shape, device, context, config)
    own = shape.quantization
    packings = WEIGHT_PACKINGS if own is None else (own_packing(own, on_gpu=device.on_gpu),)
    needed = [resident(shape, packing, context) for packing in packings]
    fifth = max(1, context // 5)
    return CapacityReport(
        shape=shape,
        device=device,
        context=context,
        demand=demand,
        by_context=tuple(resident(shape, packings[0], tokens) for tokens in CONTEXTS),
        allocations=allocations,
        fifth_tokens=fifth,
        fits=tuple(
            _fit(
                each,
                room_of(shape, demand, each, config),
                allocations,
                fifth,
                config.max_num_batched_tokens,
            )
            for each in needed
        ),
    )


def empty_machine(device: Device) -> tuple[MachineMemory, KVBackend]:
    """Return the memory and the KV backend of a machine on which nothing else runs."""
    machine = MachineMemory(device.memory_bytes, device.memory_bytes)
    if not device.on_gpu:
        return machine, KVBackend.POSIX
    gpu = gpu_memory(machine, device.working_set_bytes, address_bytes=device.address_bytes)
    return gpu, KVBackend.SPARSE


def room_of(
    shape: ModelShape, demand: MemoryDemand, needed: Resident, config: EngineConfig
) -> Room:
    left = max(0, demand.usable_bytes - demand.fixed_bytes - needed.weights_bytes)
    kv = kv_shape(shape)
    if not kv.slot_bytes:
        return Room(left)
    longest = smallest_context(config.max_model_len, shape.spec.max_position_embeddings)
    size, kv_bytes = kv.slot_bytes, kv.bytes_of(longest) + config.heap_bytes
    try:
        slots = slots_within(left, size, config.max_num_seqs, kv_bytes)
    except BudgetError:
        return Room(0, 0)
    return Room(left - slots * size, slots)


def allocations_of(
    shape: ModelShape, device: Device, context: int, config: EngineConfig
) -> tuple[Allocation, ...]:
    """Return three ways to allocate K and V: dense (the whole context at once), in chunks as mlx-lm
    does, and sparse (quire's own way). Raises LayoutError."""
    kv = kv_shape(shape)
    page = device.page_bytes
    sparse = paged_layout(
        kv,
        max_tokens=context,
        heap_bytes=config.heap_bytes,
        system_page_bytes=page,
        page_bytes=config.page_bytes,
    )
    chunks = grouped_layout(
        kv,
        {spec: CHUNK_TOKENS * spec.row_bytes for spec in kv.specs},  # a chunk, in place of a page
        tokens_per_block=CHUNK_TOKENS,
        blocks_per_heap=max(1, config.heap_bytes // (CHUNK_TOKENS * kv.bytes_per_token)),
        blocks_per_buffer=-(-context // CHUNK_TOKENS),
    )
    return (
        Allocation("dense", dense_layout(kv, max_tokens=context, system_page_bytes=page)),
        Allocation(f"{CHUNK_TOKENS}-token chunks", chunks),
        Allocation("sparse", sparse),
    )


def _fit(
    needed: Resident,
    room: Room,
    allocations: Sequence[Allocation],
    fifth: int,
    step_tokens: int,
) -> Fit:
    own, context = allocations[-1].layout, needed.context
    tokens = own.tokens_within(room.kv_bytes, step_tokens)
    return Fit(
        needed,
        room,
        tokens if tokens >= smallest_context(None, context) else 0,
        tuple(allocation.fit(room, context) for allocation in allocations),
        tuple(allocation.fit(room, fifth) for allocation in allocations),
    )
