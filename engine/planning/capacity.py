"""Makes the capacity report of a model: the weights, contexts and sequences that fit a device."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.build import unserved
from engine.config import EngineConfig
from engine.machine import MachineMemory, gpu_memory
from engine.models.weights import compute_itemsize
from engine.planning.devices import CostModel, Device
from engine.planning.memory import (
    BF16,
    CONTEXTS,
    STEPS,
    WEIGHT_PACKINGS,
    ModelShape,
    Packing,
    Resident,
    kv_shape,
    memory_demand,
    own_packing,
    resident,
    slot_bytes,
    weights_bytes,
)
from engine.planning.simulator import Arrival, Simulation, SimulationReport, random_arrivals
from kvcache.block import Block
from kvcache.kv_backends import KVBackend
from kvcache.layout import (
    KVLayout,
    KVShape,
    LayoutError,
    dense_layout,
    grouped_layout,
    paged_layout,
)
from kvcache.memory_budget import SMALLEST_CONTEXT_TOKENS, BudgetError, MemoryDemand, slots_within
from kvcache.state_cache import SLOTS_PER_SEQUENCE

KIB = 1024
PAGE_SIZES = tuple(kib * KIB for kib in (4, 8, 16, 32, 64, 128, 256))
MEAN_LENGTHS = (256, 1024, 4096, 16384)
# The bytes of one entry of the page table in Python's memory: a reference and a Block object.
TABLE_ENTRY_BYTES = 8 + sys.getsizeof(Block(0, 0))


@dataclass(frozen=True, slots=True)
class BlockAccount:
    """The costs in memory and time of one page size, for sequences of one mean length."""

    page_bytes: int
    tokens_per_block: int
    mean_tokens: int
    tail_tokens: float
    """The mean number of tokens that would still fit in the last block of a sequence."""
    waste: float
    """The unused fraction of a sequence's memory."""
    mappings_merged: int
    """The number of mappings of a sequence if its blocks are adjacent in their heaps."""
    mappings_scattered: int
    """The number of mappings of a sequence if its blocks are scattered over heaps."""
    table_bytes: int
    """The size of a sequence's page table on the host."""
    mapping_s_per_token: float
    """The time of mapping memory for a growing sequence, per token."""


def account(shape: KVShape, device: Device, heap_bytes: int) -> tuple[BlockAccount, ...]:
    """Return the costs of each page size that the model can use, for each of MEAN_LENGTHS."""
    accounts = []
    for page_bytes in PAGE_SIZES:
        try:
            layout = paged_layout(
                shape,
                max_tokens=2 * max(MEAN_LENGTHS),
                heap_bytes=heap_bytes,
                system_page_bytes=PAGE_SIZES[0],
                page_bytes=page_bytes,
            )
        except LayoutError:
            continue
        accounts += [block_account(layout, page_bytes, device, mean) for mean in MEAN_LENGTHS]
    return tuple(accounts)


def block_account(
    layout: KVLayout, page_bytes: int, device: Device, mean_tokens: int
) -> BlockAccount:
    blocks = layout.blocks_for(mean_tokens)
    heaps = -(-mean_tokens // layout.heap_tokens)
    regions = sum(len(group.regions) for group in layout.groups)
    tail = tail_tokens(layout.tokens_per_block, mean_tokens)
    per_block = device.mapping_batch_s + regions * device.mapping_s
    return BlockAccount(
        page_bytes=page_bytes,
        tokens_per_block=layout.tokens_per_block,
        mean_tokens=mean_tokens,
        tail_tokens=tail,
        waste=tail / (tail + mean_tokens),
        mappings_merged=regions * heaps,
        mappings_scattered=regions * blocks,
        table_bytes=TABLE_ENTRY_BYTES * blocks * len(layout.groups),
        mapping_s_per_token=per_block / layout.tokens_per_block,
    )


def tail_tokens(tokens_per_block: int, mean_tokens: int) -> float:
    """Return the mean count of unused tokens in a last block, for lengths below 2 * mean_tokens."""
    lengths = 2 * mean_tokens - 1
    full, rest = divmod(lengths, tokens_per_block)
    # Among any tokens_per_block consecutive lengths, each number of unused tokens occurs once.
    unused = full * (tokens_per_block * (tokens_per_block - 1) // 2)
    unused += rest * tokens_per_block - rest * (rest + 1) // 2
    return unused / lengths


CHUNK_TOKENS = 256
# Simulated requests arrive almost at once, so that memory limits the number that run together.
SEED = 0
REQUESTS = 48
MEAN_GAP_S = 0.05


@dataclass(frozen=True, slots=True)
class Room:
    """The memory for sequences that remains beside a model's weights."""

    kv_bytes: int
    """The bytes for K and V, or 0 if the weights alone do not fit."""
    num_slots: int = 0
    """The number of slots (recurrent states of one sequence at one position)."""
    slot_bytes: int = 0
    """The bytes of a slot, or 0 if the model has no recurrent states."""

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.num_slots * self.slot_bytes

    def sequences(self, by_kv: int) -> int:
        """Return ``by_kv`` (sequences whose K and V fit), or fewer if slots allow only fewer."""
        return min(by_kv, self.num_slots // SLOTS_PER_SEQUENCE) if self.slot_bytes else by_kv


@dataclass(frozen=True, slots=True)
class Allocation:
    """A named way to allocate memory for K and V, such as quire's own or mlx-lm's."""

    name: str
    layout: KVLayout

    def committed_bytes(self, tokens: int) -> int:
        return self.layout.blocks_for(tokens) * self.layout.block_bytes

    def fit(self, room: Room, tokens: int) -> int:
        """Return the number of sequences of ``tokens`` tokens that fit in ``room``."""
        layout = self.layout
        held = room.kv_bytes // layout.heap_bytes * layout.heap_tokens
        return room.sequences(held // layout.tokens_per_block // layout.blocks_for(tokens))


@dataclass(frozen=True, slots=True)
class QuantisationStep:
    """The memory of a model whose weights have one packing (number format), K and V another one."""

    resident: Resident
    """The memory of the weights and of one sequence that fills the context."""
    room: Room

    @property
    def contexts(self) -> int:
        return self.room.sequences(self.room.kv_bytes // self.resident.kv_bytes)


@dataclass(frozen=True, slots=True)
class Fit:
    """The numbers of sequences that fit in memory beside weights in one packing."""

    weights: Packing
    room: Room
    tokens: int
    """The number of tokens whose K and V fit, or 0 if the model cannot be served."""
    whole_context: tuple[int, ...]
    """For each Allocation, the number of sequences as long as the context that fit."""
    mean_length: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Crowd:
    """The results of the simulated workload, with one report for each Allocation."""

    weights: Packing
    room: Room
    requests: int
    reports: tuple[SimulationReport, ...]


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """All numbers of the capacity report. K and V are bf16 unless a field names a packing."""

    shape: ModelShape
    device: Device
    memory_bytes: int
    """The machine's memory, of which the device may use ``demand.machine_bytes``."""
    context: int
    demand: MemoryDemand
    """The memory that the model needs beside weights and K and V."""
    by_context: tuple[Resident, ...]
    """The memory of the weights and of one sequence, both in bf16, for each length in CONTEXTS."""
    steps: tuple[QuantisationStep, ...]
    blocks: tuple[BlockAccount, ...]
    allocations: tuple[Allocation, ...]
    """The dense, the chunked and the sparse allocation, in this order."""
    mean_tokens: int
    """The mean length of the simulated sequences, prompt and answer together."""
    fits: tuple[Fit, ...]
    problem: str | None
    """The reason why the device cannot run the model, or None if it can."""
    crowd: Crowd | None
    """The simulation's results; None if no packing of weights leaves room for one context."""


def plan_capacity(
    shape: ModelShape,
    device: Device,
    memory_bytes: int,
    context: int,
    config: EngineConfig,
    *,
    working_set_bytes: int | None = None,
) -> CapacityReport:
    """Return the report for sequences of at most ``context`` (2 or more) tokens. The device may use
    ``working_set_bytes`` of memory; None means the device's default. Raises LayoutError if the size
    of a token's K does not divide a page."""
    if working_set_bytes is None:
        working_set_bytes = device.working_set_bytes(memory_bytes)
    machine = MachineMemory(memory_bytes, memory_bytes)
    kv_backend = KVBackend.SPARSE if device.on_gpu else KVBackend.POSIX
    demand = memory_demand(
        shape.spec,
        replace(config, max_model_len=context),
        gpu_memory(machine, working_set_bytes) if device.on_gpu else machine,
        kv_shape(shape),
        kv_backend,
        compute_itemsize("BF16", on_gpu=device.on_gpu),
    )
    allocations = allocations_of(shape, device, context, config)
    arrivals = random_arrivals(
        SEED, requests=REQUESTS, longest_tokens=context, mean_gap_s=MEAN_GAP_S
    )
    mean_tokens = sum(arrival.tokens for arrival in arrivals) // len(arrivals)
    steps = tuple(
        QuantisationStep(
            resident(shape, weights, kv, context), room_of(shape, demand, weights, config)
        )
        for weights, kv in STEPS
    )
    return CapacityReport(
        shape=shape,
        device=device,
        memory_bytes=memory_bytes,
        context=context,
        demand=demand,
        by_context=tuple(resident(shape, BF16, BF16, tokens) for tokens in CONTEXTS),
        steps=steps,
        blocks=account(kv_shape(shape), device, config.heap_bytes),
        allocations=allocations,
        mean_tokens=mean_tokens,
        fits=tuple(
            _fit(
                packing, room_of(shape, demand, packing, config), allocations, context, mean_tokens
            )
            for packing in WEIGHT_PACKINGS
        ),
        problem=unserved(shape.spec, kv_backend),
        crowd=_crowd(shape, device, demand, allocations, arrivals, context, config),
    )


def room_of(
    shape: ModelShape, demand: MemoryDemand, weights: Packing, config: EngineConfig
) -> Room:
    left = max(0, demand.usable_bytes - demand.fixed_bytes - weights_bytes(shape, weights))
    size = slot_bytes(shape)
    if not size:
        return Room(left)
    try:
        slots = slots_within(left, size, config.max_num_seqs)
    except BudgetError:
        return Room(0, 0, size)
    return Room(left - slots * size, slots, size)


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
    weights: Packing, room: Room, allocations: Sequence[Allocation], context: int, mean_tokens: int
) -> Fit:
    own = allocations[-1].layout
    tokens = room.kv_bytes // own.heap_bytes * own.heap_tokens
    return Fit(
        weights,
        room,
        tokens if tokens >= min(SMALLEST_CONTEXT_TOKENS, context) else 0,
        tuple(allocation.fit(room, context) for allocation in allocations),
        tuple(allocation.fit(room, mean_tokens) for allocation in allocations),
    )


def _crowd(
    shape: ModelShape,
    device: Device,
    demand: MemoryDemand,
    allocations: Sequence[Allocation],
    arrivals: Sequence[Arrival],
    context: int,
    config: EngineConfig,
) -> Crowd | None:
    """Run the simulation. Quantized weights stay as stored; other weights get the widest packing
    that fits. Return None if no packing fits."""
    own = shape.quantization
    packings = WEIGHT_PACKINGS if own is None else (own_packing(own, on_gpu=device.on_gpu),)
    for weights in packings:
        room = room_of(shape, demand, weights, config)
        if all(allocation.fit(room, context) for allocation in allocations):
            break
    else:
        return None
    cost = CostModel.of(shape, device, weights, BF16)
    reports = [
        Simulation(
            allocation.layout,
            cost,
            replace(config, max_num_seqs=len(arrivals)),
            arrivals,
            max_model_len=context,
            kv_budget_bytes=room.kv_bytes,
            num_slots=room.num_slots,
        ).run()
        for allocation in allocations
    ]
    return Crowd(weights, room, len(arrivals), tuple(reports))
