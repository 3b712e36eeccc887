"""Plans the memory of K and V once at start, and the limits that follow from the plan::

    machine - headroom (for other programs) - weights - activations - MLX's cache - grammars
        = K and V

On a CPU the memory that is available at start is a further limit, because a container that exceeds
it is killed. On a GPU, "machine" is the GPU's working set, the memory that a GPU may use. Available
memory is then no limit, because macOS compresses other programs' memory to make room."""

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from kvcache.backends.choice import KVBackend
from kvcache.config import CacheSettings
from kvcache.layout import (
    METAL_PAGES,
    Group,
    KVLayout,
    KVShape,
    dense_layout,
    paged_layout,
    tokens_of_whole_pages,
)
from kvcache.slots import SLOTS_PER_CONVERSATION, SLOTS_PER_SEQUENCE

GIB = 1024**3
MIB = 1024**2
# Dense buffers take all their memory at start. The context is shortened until all sequences fit,
# but not below this many tokens. If the context is still too long, fewer sequences are served.
DENSE_MIN_CONTEXT_TOKENS = 4096
# A cache for fewer tokens than this is refused, unless the settings ask for one.
SMALLEST_CONTEXT_TOKENS = 2048
# The share that recurrent states may take of the memory for K, V and states, and the share that
# windows may take of the memory for K and V.
STATE_SHARE = WINDOW_SHARE = 1 / 3
# With more sequences than these, one sequence's slots keep states for later prompts.
SEQUENCES_WITHOUT_SPARE = 2
# Sparse buffers may take one part in ADDRESS_PARTS of the GPU's addresses. MLX's arrays and heaps
# need addresses as well, and the system answers slowly, or not at all, when few are left.
ADDRESS_PARTS = 4


class BudgetError(ValueError):
    """Limits do not fit together. The message names the figure that does not fit."""


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """The memory of the machine, and the memory that all but the cache needs, in bytes."""

    machine_bytes: int
    """The memory of the machine or its container, or the working set of its GPU."""
    available_bytes: int
    """Memory of the machine that no program uses when the server starts."""
    headroom_bytes: int
    """Memory of the machine that is left to other programs."""
    weights_bytes: int
    activation_bytes: int
    mlx_cache_bytes: int
    grammar_bytes: int = 0
    on_gpu: bool = False
    """True if ``machine_bytes`` is the working set of a GPU: the memory that it may use."""

    @property
    def fixed_bytes(self) -> int:
        working = self.activation_bytes + self.mlx_cache_bytes + self.grammar_bytes
        return self.weights_bytes + working

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(
            self.machine_bytes, self.available_bytes, self.headroom_bytes, on_gpu=self.on_gpu
        )


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """The user's settings of the cache and limits of serving. quire chooses those that are None."""

    kv_backend: KVBackend
    settings: CacheSettings
    max_num_seqs: int
    max_model_len: int | None
    max_num_batched_tokens: int
    max_buffer_bytes: int | None = None
    """The size of the largest allocation that the device allows, or None without a limit."""
    address_bytes: int | None = None
    """The addresses that a process has on the GPU, or None if they limit nothing."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The planned use of memory, and the limits that follow from it."""

    demand: MemoryDemand
    layout: KVLayout
    kv_budget_bytes: int
    """The most memory of K and V, a multiple of a heap's size."""
    kv_tokens: int
    """The number of tokens of all sequences together."""
    max_model_len: int
    max_num_seqs: int
    max_buffers: int
    """The most buffers (address ranges, one per sequence) of a group of layers."""
    note: str | None = None
    """A sentence with a further reason for the limits, or None."""
    num_slots: int = 0

    @property
    def state_bytes(self) -> int:
        return self.num_slots * self.layout.shape.slot_bytes

    @property
    def warning(self) -> str | None:
        """A sentence if less memory is available than quire takes at start, else None. It then
        takes ``fixed_bytes`` of ``demand`` and one heap."""
        needed = self.demand.fixed_bytes + self.layout.heap_bytes
        available = self.demand.available_bytes
        if needed <= available:
            return None
        return (
            f"a tight fit: this takes {gib(needed)} from the start, and {gib(available)} are "
            f"available now; for the other {gib(needed - available)} the system will compress or "
            "swap what other programs hold: end some, or serve a smaller model"
        )

    def figures(self) -> dict[str, int]:
        """Return the planned bytes and limits by name, for a JSON report."""
        demand = asdict(self.demand)
        del demand["on_gpu"]
        return demand | {
            "usable_bytes": self.demand.usable_bytes,
            "kv_budget_bytes": self.kv_budget_bytes,
            "kv_bytes_per_token": self.layout.shape.lasting_bytes_per_token,
            "state_bytes": self.state_bytes,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
        }

    def line(self) -> str:
        demand = self.demand
        whole = "the GPU's working set" if demand.on_gpu else "this machine"
        states = f"states up to {gib(self.state_bytes)}, " if self.num_slots else ""
        return (
            f"K and V up to {gib(self.kv_budget_bytes)} ({self.kv_tokens} tokens), {states}weights "
            f"{gib(demand.weights_bytes)}, of {gib(demand.machine_bytes)} of {whole}"
        )

    def lines(self) -> list[str]:
        """Return the planned bytes and the limits as text."""
        demand, layout = self.demand, self.layout
        memory = "working set of the GPU" if demand.on_gpu else "memory of this machine"
        sizes = [
            (memory, demand.machine_bytes),
            ("  available now", demand.available_bytes),
            ("  headroom for other programs", demand.headroom_bytes),
            ("usable", demand.usable_bytes),
            ("  weights", demand.weights_bytes),
            ("  activations", demand.activation_bytes),
            ("  MLX cache", demand.mlx_cache_bytes),
            ("  compiled grammars", demand.grammar_bytes),
            ("K and V, at most", self.kv_budget_bytes),
        ]
        states = []
        if self.num_slots:
            sizes.append(("states, at most", self.state_bytes))
            states.append(
                f"states: {self.num_slots} slots of {gib(self.state_bytes // self.num_slots)}, "
                f"{SLOTS_PER_SEQUENCE} for each sequence that runs"
            )
        notes = [] if self.note is None else [self.note]
        counts = layout.heap_blocks_within(self.kv_budget_bytes)
        windows = [
            f"of these, {gib(blocks * group.block_bytes)} for windows of {group.window} tokens"
            for group, blocks in zip(layout.groups, counts, strict=True)
            if group.window
        ]
        return [f"{label:<32}{gib(amount):>12}" for label, amount in sizes] + [
            f"K and V: {self.kv_tokens} tokens of {layout.shape.lasting_bytes_per_token} bytes in "
            f"blocks of {layout.tokens_per_block} tokens ({gib(layout.block_bytes)}), "
            f"{max(counts) // layout.groups[0].blocks_per_heap} heaps of {gib(layout.heap_bytes)}"
            + (f" in {len(layout.groups)} groups" if len(layout.groups) > 1 else ""),
            *windows,
            *states,
            f"limits: {self.max_model_len} tokens per sequence, {self.max_num_seqs} sequences",
            *notes,
        ]


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits and settings of the cache."""

    budget_bytes: int
    max_sequences: int
    max_buffers: int
    """The most buffers (address ranges, one per sequence) of a group of layers."""
    settings: CacheSettings
    max_step_tokens: int = sys.maxsize
    """The most tokens that a step computes (max_num_batched_tokens)."""


def fit(
    demand: MemoryDemand,
    request: CacheRequest,
    shape: KVShape,
    *,
    model_max_len: int,
    system_page_bytes: int,
) -> MemoryPlan:
    """Return the largest limits that fit into memory, or the user's limits if they fit.
    ``model_max_len`` is the most positions that the model supports. Raises BudgetError with the
    figure that does not fit, and LayoutError if the configured page size does not fit."""
    set_len = request.max_model_len
    if set_len is not None and set_len > model_max_len:
        raise BudgetError(
            f"max_model_len is {set_len} tokens, but the model knows only {model_max_len} positions"
        )
    smallest = smallest_context(set_len, model_max_len)
    if set_len is None and request.settings.kv_budget_bytes is not None:
        smallest = 1  # the user may set any budget, however small
    budget = _budget(demand, request, shape, smallest)
    # The limit of K and V if one allocation (an arena) holds all sequences' K and V.
    arena = request.max_buffer_bytes if request.kv_backend is KVBackend.METAL_DENSE else None
    num_slots, slot_bytes = 0, shape.slot_bytes
    if slot_bytes:
        kv_bytes = shape.bytes_of(smallest) + request.settings.heap_bytes
        num_slots = slots_within(budget, slot_bytes, request.max_num_seqs, kv_bytes, arena)
        budget -= num_slots * slot_bytes
    clamped = arena is not None and budget > arena
    budget = min(budget, budget if arena is None else arena)
    if request.kv_backend.on_gpu:
        system_page_bytes = min(METAL_PAGES)
    max_len = set_len or _longest(request, shape, budget, model_max_len, system_page_bytes)
    layout = _layout(request, shape, max_len, budget, system_page_bytes)
    step_tokens = request.max_num_batched_tokens
    capacity = layout.tokens_within(budget, step_tokens)
    if capacity < smallest:
        needed = layout.bytes_for(smallest, step_tokens)
        raise BudgetError(
            f"one sequence of {smallest} tokens needs {gib(needed)} of K and V, but the KV budget "
            f"of {gib(budget)} holds {capacity} tokens in whole heaps of {gib(layout.heap_bytes)}: "
            + ("the device allocates no more at once: " if clamped else "raise --kv-budget or ")
            + "lower --max-model-len"
        )
    if capacity < max_len:
        max_len = capacity
        layout = layout.shortened(max_len)
    counts = layout.heap_blocks_within(budget)
    sequences = min(
        capacity // layout.tokens_per_block, _sequences(request, layout, counts, max_len)
    )
    if num_slots:
        sequences = min(sequences, sequences_within(num_slots))
    note = None
    if clamped and (max_len, sequences) != (set_len or model_max_len, request.max_num_seqs):
        note = (
            f"K and V of all sequences are one allocation, and the device's largest is "
            f"{gib(budget)}: that shortens the context or leaves fewer sequences"
        )
    # With a spare buffer for each sequence, no new one waits until old buffers are unmapped. Dense
    # buffers cost memory.
    buffers = sequences if request.kv_backend.is_dense else 2 * sequences
    kv_bytes = layout.bytes_of(counts)
    if request.kv_backend.is_dense:
        kv_bytes = sequences * layout.heap_bytes  # a sequence has one heap
    tokens = layout.tokens_within(kv_bytes, step_tokens)
    plan = MemoryPlan(
        demand, layout, kv_bytes, tokens, max_len, sequences, buffers, note, num_slots
    )
    return _within_addresses(plan, request)


def _sequences(request: CacheRequest, layout: KVLayout, counts: Sequence[int], max_len: int) -> int:
    """Return the number of sequences whose windows fit, while one of them computes a prompt."""
    sequences = request.max_num_seqs
    for group, blocks in zip(layout.groups, counts, strict=True):
        largest = group.most_blocks(max_len, request.max_num_batched_tokens)
        if group.window and blocks >= largest:
            sequences = min(sequences, 1 + (blocks - largest) // group.kept_blocks(max_len))
    return sequences


def _within_addresses(plan: MemoryPlan, request: CacheRequest) -> MemoryPlan:
    """Return a plan whose buffers, one per sequence and one more, fit into the GPU's addresses:
    with fewer spare buffers, then with a shorter context, or with fewer sequences if the user has
    set the context. But two buffers are always planned."""
    if request.address_bytes is None or request.kv_backend is not KVBackend.SPARSE:
        return plan
    room, layout = request.address_bytes // ADDRESS_PARTS, plan.layout
    size = layout.tokens_per_block
    lengths = range(size, layout.blocks_for(plan.max_model_len) * size + 1, size)
    share = room // (plan.max_num_seqs + 1)
    fitting = bisect_right(lengths, share, key=lambda n: layout.shortened(n).address_bytes)
    shortest = request.max_model_len or SMALLEST_CONTEXT_TOKENS
    max_len = min(plan.max_model_len, max(shortest, fitting * size))
    layout = layout.shortened(max_len)
    buffers = min(plan.max_buffers, max(2, room // layout.address_bytes))
    sequences, note = min(plan.max_num_seqs, buffers - 1), plan.note
    if (max_len, sequences) != (plan.max_model_len, plan.max_num_seqs):
        note = (
            f"{gib(room)} of this GPU's addresses are for K and V of all sequences and one more: "
            f"that leaves {sequences} sequences of {max_len} tokens; lower --max-num-seqs for "
            "longer ones, or --max-model-len for more of them"
        )
    return replace(
        plan,
        layout=layout,
        max_model_len=max_len,
        max_num_seqs=sequences,
        max_buffers=buffers,
        note=note,
    )


def slots_within(
    budget: int, slot_bytes: int, max_sequences: int, kv_bytes: int, arena: int | None = None
) -> int:
    """Return the number of state slots: as many as fit into a third of the budget and leave
    ``kv_bytes`` to K and V, or all that are useful, and no fewer than one sequence needs plus one.
    Many slots are rounded to whole sequences. ``arena`` is the limit in bytes if one allocation
    holds all slots. Raises BudgetError if the fewest slots take the whole budget."""
    fewest = SLOTS_PER_SEQUENCE + 1
    if fewest * slot_bytes >= budget:
        raise BudgetError(
            f"{gib(budget)} are left for K, V and states, and the states of one sequence need "
            f"{fewest} slots of {gib(slot_bytes)}: serve a smaller model, or lower --headroom"
        )
    useful = (SLOTS_PER_SEQUENCE + SLOTS_PER_CONVERSATION) * max_sequences
    share = min(int(budget * STATE_SHARE), budget - kv_bytes)
    room = share if arena is None else min(share, arena)
    slots = room // slot_bytes
    if slots >= (SEQUENCES_WITHOUT_SPARE + 1) * SLOTS_PER_SEQUENCE:
        slots -= slots % SLOTS_PER_SEQUENCE
    return max(fewest, min(useful, slots))


def sequences_within(num_slots: int) -> int:
    """Return the number of sequences that may run beside the slots that keep states."""
    whole = num_slots // SLOTS_PER_SEQUENCE
    return max(min(SEQUENCES_WITHOUT_SPARE, whole), whole - 1)


def smallest_context(setting: int | None, model_max_len: int) -> int:
    """Return the length in tokens of the sequence that must fit for quire to start."""
    return setting or min(SMALLEST_CONTEXT_TOKENS, model_max_len)


def usable_bytes(
    machine_bytes: int, available_bytes: int, headroom_bytes: int, *, on_gpu: bool
) -> int:
    left = machine_bytes - headroom_bytes
    return left if on_gpu else min(left, available_bytes)


def _budget(demand: MemoryDemand, request: CacheRequest, shape: KVShape, smallest: int) -> int:
    """Return the bytes for K, V and recurrent states, before rounding to whole heaps."""
    setting = request.settings.kv_budget_bytes
    if setting is not None:
        room = demand.machine_bytes - demand.fixed_bytes
        if setting > room:
            raise BudgetError(
                f"the KV budget of {gib(setting)} does not fit: the machine has "
                f"{gib(demand.machine_bytes)}, of which weights, activations and MLX's cache take "
                f"{gib(demand.fixed_bytes)}: lower --kv-budget"
            )
        return setting
    left = demand.usable_bytes - demand.fixed_bytes
    if left < shape.bytes_of(smallest):
        raise BudgetError(
            f"{gib(left) if left > 0 else 'nothing'} is left for K and V, and one sequence of "
            f"{smallest} tokens needs {gib(shape.bytes_of(smallest))}: of "
            f"{gib(demand.usable_bytes)} usable, weights take {gib(demand.weights_bytes)}, "
            f"activations {gib(demand.activation_bytes)}, MLX's cache "
            f"{gib(demand.mlx_cache_bytes)} and compiled grammars {gib(demand.grammar_bytes)}: "
            "serve a smaller model, lower --max-model-len, --max-num-batched-tokens or --headroom "
            f"({gib(demand.headroom_bytes)} now), or take it from others with --kv-budget"
        )
    return left


def _longest(
    request: CacheRequest, shape: KVShape, budget: int, model_max_len: int, system_page_bytes: int
) -> int:
    """Return the most tokens of a sequence, which memory in pages may limit further."""
    if not request.kv_backend.is_dense:
        return model_max_len
    tokens = budget // shape.bytes_per_token
    unit = tokens_of_whole_pages(shape, system_page_bytes)
    shared = max(tokens // request.max_num_seqs // unit * unit, DENSE_MIN_CONTEXT_TOKENS)
    return max(1, min(model_max_len, tokens, shared))


def _layout(
    request: CacheRequest, shape: KVShape, max_len: int, budget: int, system_page_bytes: int
) -> KVLayout:
    if request.kv_backend.is_dense:
        return dense_layout(shape, max_tokens=max_len, system_page_bytes=system_page_bytes)
    layout = paged_layout(
        shape,
        max_tokens=max_len,
        heap_bytes=min(request.settings.heap_bytes, budget),
        system_page_bytes=system_page_bytes,
        page_bytes=request.settings.page_bytes,
        device_pages=METAL_PAGES if request.kv_backend.on_gpu else None,
    )
    of_windows = sum(group.block_bytes for group in layout.groups if group.window)
    shared = int(budget * WINDOW_SHARE) // of_windows if of_windows else 0
    groups = [_limited(group, request, max_len, shared) for group in layout.groups]
    return replace(layout, groups=tuple(groups))


def _limited(group: Group, request: CacheRequest, max_len: int, shared: int) -> Group:
    """Return the group with its numbers of useful blocks. ``shared`` are all windows' blocks that
    leave enough memory to other groups."""
    kept = group.kept_blocks(max_len)
    useful = request.max_num_seqs * kept
    if group.window:
        largest = group.most_blocks(max_len, request.max_num_batched_tokens)
        # As many blocks again keep prefixes.
        useful = max(largest, min(2 * useful + largest - kept, shared))
        if request.kv_backend is KVBackend.SPARSE:
            group = group.with_ring(request.max_num_batched_tokens)
    elif request.settings.kv_budget_bytes is not None:
        return group
    heaps = -(-useful // group.blocks_per_heap)
    return replace(group, useful_blocks=heaps * group.blocks_per_heap)


def gib(amount: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if abs(amount) >= unit:
            return f"{amount / unit:.2f} {name}"
    return f"{amount} bytes"
