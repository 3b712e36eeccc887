"""Types of the native extension: memory of the POSIX and Metal backends (kinds of memory for K
and V), and MLX primitives that read and write this memory.

Ownership. Python objects here are handles that may be dropped at any time: primitives, row tables
and queued operations keep alive the objects that they use. Address ranges and heaps release their
memory when nothing refers to them.

Threads. Memory operations may be called from any thread. MLX operations are made and evaluated on
the engine's thread; they run on MLX's stream thread and on the threads of ``CpuWorkers``.

Errors are raised when an object or operation is made, before any memory is touched: IndexError
(``std::out_of_range``) for a count or index outside its interval, ValueError for arguments that
cannot work together, OSError with errno for a refused system call, RuntimeError for a bug, such as
a block mapped twice. Evaluation raises RuntimeError if a result finds no memory, or the stream is
of the wrong device: the POSIX backend needs a CPU stream, a ``MetalKVBackend`` a GPU stream.

Names after the heading "Metal" exist only where ``HAS_METAL`` is true."""

from collections.abc import Sequence
from typing import overload

import mlx.core as mx

HAS_METAL: bool
"""Whether this build has the Metal backends. ``metal_capabilities`` looks for a device."""

MLX_VERSION: str
SYSTEM_PAGE_BYTES: int
"""The MMU page of this system: 4096 on most Linux machines, 16384 on a Mac."""

def instruction_sets() -> list[str]:
    """Return the instruction sets that this machine can run, the best one first: "amx", "bf16",
    "vnni", "avx512", "avx2" and "sse2" on x86-64, "dotprod" and "neon" on arm64."""

class Geometry:
    """The shape of K and V of a layer group. A region is one layer's K or V; a block is the memory
    of the same consecutive tokens in all regions. Ranges and heaps store one region after another,
    so that adjacent blocks of a heap take one mapping per region."""

    def __init__(
        self,
        *,
        page_bytes: int,
        tokens_per_block: int,
        blocks_per_heap: int,
        blocks_per_range: int,
        region_row_bytes: list[int],
    ) -> None:
        """page_bytes: a multiple of SYSTEM_PAGE_BYTES. region_row_bytes: the bytes of one token, by
        region; ``tokens_per_block`` tokens must fill whole pages in each. The limits are 4096
        regions and 2**46 bytes per range."""
    @property
    def block_bytes(self) -> int: ...
    @property
    def heap_bytes(self) -> int: ...
    @property
    def range_bytes(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...

class Heap:
    """Physical memory for ``blocks_per_heap`` blocks."""

    @staticmethod
    def shared(geometry: Geometry) -> Heap:
        """Makes a shared-memory file (memfd, on a Mac an unlinked shm object), still empty."""
    @staticmethod
    def dense(geometry: Geometry) -> Heap:
        """Makes one private allocation, committed in full when it is mapped."""
    @property
    def committed_bytes(self) -> int:
        """Bytes that the system charges for the heap: ``st_blocks`` of a memfd. For any thread."""

class AddressRange:
    """Contiguous addresses for the K and V of one sequence.

    Reading a block without memory or writing a read-only block ends the process with SIGSEGV."""

    @staticmethod
    def sparse(geometry: Geometry) -> AddressRange:
        """Reserves ``range_bytes`` of addresses, at which blocks of shared heaps can be mapped."""
    @staticmethod
    def dense(geometry: Geometry) -> AddressRange:
        """Makes a range for one whole dense heap, whose addresses the range will have."""
    def map(self, heap: Heap, heap_block: int, block: int, count: int, writable: bool) -> None:
        """Maps heap blocks from ``heap_block`` on at ``count`` range blocks from ``block`` on.

        A block of a shared heap may be mapped any number of times. Raises ValueError for read-only
        mappings in dense ranges and for ranges of a ``MetalKVBackend``, which only ``Mapper`` maps;
        OSError(ENOMEM), with nothing mapped, if the process may have no more mappings. Releases the
        interpreter lock."""
    @property
    def mapped_tokens(self) -> int:
        """The number of tokens of the leading mapped blocks, including read-only blocks."""
    @property
    def base_address(self) -> int:
        """The address of region 0 for kernels; 0 for paged ranges and dense ones without a heap."""

class Mapper:
    """A thread that changes mappings in order. Each operation has a rising number, its ticket."""

    def __init__(self) -> None: ...
    def map(
        self,
        range: AddressRange,
        heap: Heap,
        heap_block: int,
        block: int,
        count: int,
        writable: bool,
    ) -> int:
        """Queues an ``AddressRange.map``; returns the operation's ticket.

        A writable mapping also commits memory if the system can (Linux 5.14) and has memory left,
        so that later writes take no page fault. ``refused`` tells whether the mapping was made.
        Mapping a block already mapped, or a heap of another kind, is a ``failure``."""
    def refused(self, ticket: int) -> bool:
        """Returns whether the system refused a completed ``map``, which then changed nothing: True
        once per ticket, False for other operations. Raises RuntimeError if not completed yet."""
    def unmap(self, range: AddressRange, block: int, count: int) -> int:
        """Queues the unmapping of ``count`` range blocks from ``block`` on; returns its ticket."""
    def release(self, heap: Heap, block: int, count: int) -> int:
        """Queues releasing the memory of unmapped heap blocks to the system; returns the ticket."""
    @property
    def completed(self) -> int:
        """The newest ticket up to which all operations are done; 0 at first."""
    @property
    def failure(self) -> str:
        """The first failed operation's message, or "". After a failure mappings are in doubt."""
    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Waits without the interpreter lock; returns False after ``timeout_s`` (0 to 3600)."""

class CopyCounter:
    """Counts the bytes of K and V that ``block_copy`` has copied."""

    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...

class CpuWorkers:
    """The threads and the instruction set of the CPU kernels, shared by all operations."""

    def __init__(
        self, threads: int, instruction_set: str = "auto", activations: str = "float32"
    ) -> None:
        """threads: 1 to 256, including the caller's. activations: float32, bfloat16 or int8, the
        type to which products of packed weights may round x if the instruction set has the type."""
    @property
    def threads(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...

class RowTable:
    """The places of the rows (tokens) of a step's flat token array in address ranges.

    segments: ``(range, start, count)``: the next ``count`` rows are the range's positions from
    ``start`` on. All blocks from 0 to ``start + count`` must be mapped, which this class checks and
    kernels do not. Rows in read-only blocks cannot be appended. The limits are 2**24 rows and
    positions below 2**31.

    A table keeps addresses alive, not mappings: before unmapping a block below ``start + count``,
    wait for the step's epoch, so that everything made of the table has been evaluated. Otherwise
    kernels end in SIGSEGV; no check can prevent this, because ``Mapper`` has its own thread."""

    def __init__(self, segments: list[tuple[AddressRange, int, int]]) -> None: ...
    def __len__(self) -> int: ...

class Layer:
    """One layer's regions of K and V, and their dtype: bfloat16, float32, or on Metal float16."""

    def __init__(self, key_region: int, value_region: int, dtype: mx.Dtype) -> None: ...

# Below, ``token`` is a layer's ordering handle, an array of one element: append() returns the next
# handle, and operations that read K and V take the newest handle, so that reads wait for writes.
# Sums are in float32, in an order that depends on a row's position alone: a row's result has the
# same bits in any batch, in decode and chunk calls, with one instruction set and any threads.

@overload
def append(
    token: mx.array,
    keys: mx.array,
    values: mx.array,
    rows: MetalRows,
    layer: Layer,
    workers: MetalKVBackend,
) -> mx.array: ...
@overload
def append(
    token: mx.array,
    keys: mx.array,
    values: mx.array,
    rows: RowTable,
    layer: Layer,
    workers: CpuWorkers,
) -> mx.array:
    """Writes row i of keys and values to the place of row i; returns the next ordering handle.

    keys, values: ``[len(rows), kv_heads, head_dim]`` float32 or bfloat16 (on Metal also float16),
    any strides; rounded to nearest even. Raises IndexError for rows in read-only blocks."""

@overload
def decode_attention(
    token: mx.array,
    queries: mx.array,
    rows: MetalRows,
    first_row: int,
    layer: Layer,
    kv_heads: int,
    scale: float,
    workers: MetalKVBackend,
) -> mx.array: ...
@overload
def decode_attention(
    token: mx.array,
    queries: mx.array,
    rows: RowTable,
    first_row: int,
    layer: Layer,
    kv_heads: int,
    scale: float,
    workers: CpuWorkers,
) -> mx.array:
    """Returns the softmax attention of R rows, each over positions 0 up to the row's own.

    queries, and the result: ``[R, query_heads, head_dim]`` float32 or bfloat16 (on Metal also
    float16), from row ``first_row`` on. ``query_heads`` is a multiple of ``kv_heads``; head_dim is
    32 (not on Metal), 64, 128 or 256. Fast for one row per sequence, correct for any."""

def chunk_attention(
    token: mx.array,
    queries: mx.array,
    rows: RowTable,
    segment: int,
    layer: Layer,
    kv_heads: int,
    scale: float,
    workers: CpuWorkers,
) -> mx.array:
    """Returns what ``decode_attention`` does for the rows of one segment, ``[count, query_heads,
    head_dim]``, but is fast for many rows."""

def region_view(
    token: mx.array,
    range: AddressRange,
    region: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: mx.Dtype,
    kv_backend: MetalKVBackend | None = None,
) -> mx.array:
    """Returns the first ``tokens`` rows of a region as ``[tokens, kv_heads, head_dim]``, uncopied.

    The view keeps addresses alive, not mappings: do not read it after the rows are unmapped.
    backend: needed on Metal. Raises ValueError for a paged range, RuntimeError for a sparse range
    whose newest step has one row and is not complete: ``gather`` serves both."""

def block_copy(
    token: mx.array,
    source: AddressRange,
    source_block: int,
    target: AddressRange,
    target_block: int,
    tokens: int,
    counter: CopyCounter,
) -> mx.array:
    """Copies the first ``tokens`` rows of a block, in all regions, to a writable block; then adds
    the bytes to the counter. Returns the next ordering handle."""

# --- Metal: where HAS_METAL is true ----------------------------------------------------------------

def metal_capabilities() -> dict[str, bool | int | str | list[str]]:
    """Return the properties of the default Metal device, or {} if there is no device."""

class MetalKVBackend:
    """The heaps and ranges of one kind and geometry on the default Metal device.

    Only a ``Mapper`` maps and unmaps them, so that no call waits for the device. Only the engine's
    thread may call; the work of ``copy_block`` runs on the mapper's thread."""

    def __init__(
        self,
        kind: str,
        geometry: Geometry,
        max_ranges: int,
        timeout_s: float = 30.0,
        max_buffer_bytes: int = 0,
        residency_keep_s: float = 0.0,
        maps_beside_steps: bool = False,
    ) -> None:
        """kind: "sparse", "paged" or "dense". max_ranges: the limit of ranges. timeout_s: the time
        for any one operation of the device (0 to 3600), after which the backend has failed for
        good. max_buffer_bytes: the limit of one Metal buffer, of which a sparse range may need
        several; 0 means the device's own limit. residency_keep_s: how long a thread keeps memory
        resident after its last use (0 to 86400). maps_beside_steps: whether mappings of a sparse
        backend may change while steps are in flight. If not, operations of ``Mapper`` fail
        meanwhile, mappings take effect with ``finish_mappings``, and calling ``rows`` earlier
        raises RuntimeError. Raises RuntimeError that names everything the device lacks."""
    def hold(self, arrays: list[mx.array]) -> None:
        """Keeps evaluated arrays (the weights) resident, too. Call once, before the first step.
        Raises ValueError if an array is not evaluated, OSError(ENOMEM) if the device refuses."""
    def new_heap(self) -> Heap:
        """Raises OSError(ENOMEM) if the device refuses. Releases the interpreter lock."""
    def new_range(self) -> AddressRange:
        """Raises OSError(ENOMEM) if the device refuses. Releases the interpreter lock."""
    def finish_mappings(self, mapper: Mapper) -> int:
        """Queues a wait for all mappings that were queued before; returns the wait's ticket."""
    def commit_heap(self, mapper: Mapper, heap: Heap) -> int:
        """Queues allocating the memory of a released heap again; returns the ticket, which is
        ``refused`` if the device refuses."""
    def rows(self, segments: list[tuple[AddressRange, int, int]]) -> MetalRows:
        """Returns the rows of the next step, as in ``RowTable``, and opens the step's epoch;
        ``step_end`` or ``abandon`` must close epochs in order. Raises RuntimeError if a row would
        be written in a shared block."""
    def make_slots(self, count: int, slot_bytes: int) -> None:
        """Makes ``count`` slots (recurrent states), which keep their addresses. May be called once,
        before the first step. Raises RuntimeError at a second call, or if the slots of a dense
        backend exceed one buffer; OSError(ENOMEM) if the device refuses."""
    def state_rows(
        self,
        rows: MetalRows,
        segments: list[tuple[int, int | None, list[tuple[int, int]]]],
    ) -> MetalStateRows:
        """Returns the slots that a step reads and writes. segments: ``(count, read, writes)`` of
        every sequence in the order of the rows; ``read`` None means zeros. writes: ``(rows,
        slot)``, ascending: the slot gets the state after ``rows`` rows; the last has all rows, and
        may be the slot that was read. Raises RuntimeError if a slot is read before any write, is
        written twice, or may still be used by another sequence's step."""
    def copy_block(
        self,
        mapper: Mapper,
        source: AddressRange,
        source_block: int,
        target: AddressRange,
        target_block: int,
        tokens: int,
        counter: CopyCounter,
    ) -> int:
        """Queues a copy of the first ``tokens`` rows of a block, in all regions, to a writable
        block; returns the ticket. The steps that wrote the rows must have completed."""
    def abandon(self, rows: MetalRows) -> None:
        """Notes that the step failed and no longer runs: its epoch counts as completed."""
    @property
    def completed_epoch(self) -> int:
        """The newest epoch up to which all steps have completed; 0 at first."""
    @property
    def buffers_per_range(self) -> int: ...
    @property
    def failure(self) -> str:
        """The command that the device did not finish in time, or "". After a failure no result is
        valid."""
    def shutdown(self) -> bool:
        """Waits for all steps, unmaps and releases everything. Returns False if the device did not
        answer: then the process must end at once. Releases the interpreter lock."""

class MetalRows:
    """The places of the rows of one step's flat token array, and the step's epoch (its number)."""

    def __len__(self) -> int: ...
    @property
    def epoch(self) -> int: ...

class MetalStateRows:
    """The slots (recurrent states) that the sequences of one step read and write."""

class RopeTable:
    """The rotation of heads (RoPE), for all positions."""

    def __init__(self, frequencies: Sequence[float], magnitude: float = 1.0) -> None:
        """frequencies: ``[pairs]``, at most 128: dimensions i and ``i + pairs`` of a head rotate
        together by ``position * frequencies[i]`` radians; others do not. magnitude: a factor of the
        rotated dimensions. Raises ValueError if frequencies are too many or not finite."""

@overload
def project_append(
    token: mx.array,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    norms: tuple[mx.array, mx.array, float] | None,
    rope: RopeTable | None,
    rows: MetalRows,
    layer: Layer,
    kv_backend: MetalKVBackend,
) -> tuple[mx.array, mx.array]:
    """Applies an RMS norm over head_dim and RoPE to queries and keys, unless None, then appends;
    returns the next ordering handle and the queries ``[len(rows), query_heads, head_dim]``.

    queries: ``[len(rows), query_heads, head_dim]``; keys, values: ``[len(rows), kv_heads,
    head_dim]``; all of one dtype. norms: the weights of queries and of keys, ``[head_dim]``
    float32, and eps. Raises ValueError if rope has more dimensions than a head."""
@overload
def project_append(
    token: mx.array,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    norms: tuple[mx.array, mx.array, float] | None,
    angles: mx.array | None,
    rows: RowTable,
    layer: Layer,
    workers: CpuWorkers,
) -> tuple[mx.array, mx.array]:
    """Does on the CPU, in float32, what the first overload does on a GPU.

    queries, keys, values: float32 or bfloat16 of any strides, such as parts of one matrix, which
    are not copied; the returned queries keep the dtype. angles: the result of ``rope_angles``."""

def rope_angles(rows: RowTable, rope: RopeTable, workers: CpuWorkers) -> mx.array:
    """Returns the angles of the rows, ``[len(rows), 2 * pairs]`` float32: cosines of all pairs,
    then sines, both times the magnitude. Computed in double precision."""

class StateMemory:
    """Memory for slots, the states of recurrent layers: zeros until written, at a fixed address.
    Reading or writing past the end ends the process."""

    def __init__(self, bytes: int) -> None:
        """bytes: the size, rounded up to pages. Raises OSError if no addresses are left."""
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def release(self, offset: int, bytes: int) -> None:
        """Releases whole pages, which then hold zeros. Raises ValueError for parts of pages."""
    def committed(self, offset: int, bytes: int) -> int:
        """Returns how many of these bytes are in memory. Raises ValueError for parts of pages."""

class StateRows:
    """The slots (recurrent states) that a step's rows read and write, in all recurrent layers."""

    def __init__(
        self,
        segments: list[tuple[int, int, list[tuple[int, int]]]],
        memories: list[StateMemory],
    ) -> None:
        """segments: ``(count, read, [(rows, write), ...])``, one per sequence in the order of the
        rows. read: the address of the slot with the state before the rows, or 0 for zeros. After
        the first ``rows`` rows, ascending, the state is written to the slot at address ``write``;
        the last pair has all rows, and its slot may be the one that was read. Raises IndexError if
        a slot lies in none of the memories."""
    def __len__(self) -> int: ...

class GatedDelta:
    """The parameters of a gated delta net except its projections."""

    def __init__(
        self,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv: mx.array,
        a_log: mx.array,
        dt_bias: mx.array,
        norm: mx.array,
        eps: float,
    ) -> None:
        """Value head h reads key head ``h / (value_heads / key_heads)``. key_dim and value_dim are
        multiples of 16, at most 256. All arrays are float32. conv: ``[tail_rows + 1, conv_width]``,
        the newest row's weights last, ``conv_width = 2 * key_heads * key_dim + value_heads *
        value_dim``. a_log, dt_bias: ``[value_heads]``. norm: ``[value_dim]``. eps: the norm's."""

@overload
def gated_delta(
    token: mx.array,
    qkv: mx.array,
    z: mx.array,
    a: mx.array,
    b: mx.array,
    delta: GatedDelta,
    rows: StateRows,
    offset: int,
    workers: CpuWorkers,
) -> tuple[mx.array, mx.array]:
    """Computes a gated delta net between its projections; returns the next ordering handle and
    ``RMSNorm(y) * SiLU(z)`` in z's shape. At ``offset`` bytes from its beginning a slot holds S
    ``[value_heads][value_dim][key_dim]``, then the newest rows of qkv ``[tail_rows][conv_width]``,
    all float32.

    qkv: ``[len(rows), conv_width]``, queries, keys and values before the convolution; z:
    ``[len(rows), value_heads * value_dim]``; a, b: ``[len(rows), value_heads]``; all are float32;
    parts of one matrix are not copied. Per token and value head, with queries and keys as unit
    vectors (queries also times ``key_dim ** -0.5``): ``S = S * exp(-exp(a_log) * softplus(a +
    dt_bias))``, ``S += (v - S k) * sigmoid(b) k^T``, ``y = S q``. Results depend neither on the
    division of tokens into steps nor on other sequences. Raises IndexError if a slot ends too soon
    after the offset."""
@overload
def gated_delta(
    token: mx.array,
    qkv: mx.array,
    z: mx.array,
    a: mx.array,
    b: mx.array,
    delta: GatedDelta,
    rows: MetalStateRows,
    offset: int,
    workers: MetalKVBackend,
) -> tuple[mx.array, mx.array]:
    """Does on a GPU what the first overload does on the CPU. key_dim and value_dim are 128. qkv, z,
    a, b, the result and the rows of qkv in slots have one dtype: float32, float16 or bfloat16."""

class PackedLinear:
    """A linear layer's weights, copied in the order of CPU kernels (kernels/cpu/linear.h)."""

    def __init__(
        self,
        weights: list[mx.array],
        workers: CpuWorkers,
        codes: list[tuple[mx.array, mx.array | None, int, int] | None],
        exact: bool = False,
    ) -> None:
        """weights: ``[outputs, inputs]`` float32, bfloat16, or float16 (kept as float32); several
        weights become one layer, their outputs one after the other. codes: empty, or for each
        weight of uint32 words ``(scales, biases, bits, group_size)`` from ``mx.quantize`` in mode
        affine or mxfp4, which has no biases.

        Codes are kept in 4 or 8 bits. Weights of several kinds are all kept in the widest kind,
        which is float32 if one is not quantized. exact: whether x is never rounded. Raises
        ValueError if weights cannot be packed, OSError if memory is short."""
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def packed_bytes(inputs: int, matrices: list[tuple[int, mx.Dtype, int, int]]) -> int:
    """Return ``nbytes`` of a PackedLinear. matrices: the number of outputs, the dtype of numbers or
    scales, and the bits and group size of codes (0 without codes), for each weight."""

class PackedExperts:
    """The weights of one linear layer for every expert of a mixture, each as a PackedLinear."""

    def __init__(
        self,
        weights: list[mx.array],
        workers: CpuWorkers,
        codes: list[tuple[mx.array, mx.array | None, int, int] | None],
    ) -> None:
        """The parameters of a PackedLinear, stacked: weights are ``[experts, outputs, inputs]``,
        scales and biases ``[experts, outputs, groups]``."""
    @property
    def nbytes(self) -> int: ...

# Products of packed layers are float32, each sum in the order of the inputs. A row's result has the
# same bits in any batch, on any number of threads of one instruction set. The error is at most 1e-5
# of the sum of the products' magnitudes, as native tests check.

def linear(
    x: mx.array,
    packed: PackedLinear,
    workers: CpuWorkers,
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    residual: mx.array | None = None,
) -> mx.array:
    """Returns ``x @ W.T``, ``[R, outputs]``, for rows x ``[R, ...]`` of ``inputs`` numbers. norm:
    ``[inputs]``, the weight of an RMS norm applied to x first. residual: ``[R, outputs]``, added to
    the result."""

def linear_heads(
    x: mx.array,
    packed: PackedLinear,
    workers: CpuWorkers,
    heads: Sequence[int],
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    residual: mx.array | None = None,
) -> list[mx.array]:
    """Splits the result of ``linear`` into an array ``[R, count, outputs // sum(heads)]`` for each
    count in heads. Raises IndexError for more heads than outputs, ValueError for unequal heads."""

def gated_mlp(
    x: mx.array,
    norm: mx.array,
    eps: float,
    gate_up: PackedLinear,
    down: PackedLinear,
    workers: CpuWorkers,
) -> mx.array:
    """Returns ``x + down(silu(gate(y)) * up(y))`` with y the RMS norm of x ``[R, hidden]``.
    gate_up: one layer with the outputs of gate before those of up."""

def mixture_mlp(
    x: mx.array,
    norm: mx.array,
    eps: float,
    router: PackedLinear,
    gate_up: PackedExperts,
    down: PackedExperts,
    chosen: int,
    normalised: bool,
    shared: tuple[PackedLinear, PackedLinear] | None,
    workers: CpuWorkers,
) -> mx.array:
    """Returns ``x + sum(weight * down(silu(gate(y)) * up(y)))`` over the experts that the router
    chooses for each row, the best one first, with y the RMS norm of x ``[R, hidden]``.

    router: one output per expert. The weights are the ``chosen`` largest of the softmax over all
    experts, of equal ones the first. normalised: weights are divided by their sum. shared: gate_up
    and down of an expert for all rows, whose result is multiplied by the sigmoid of one more router
    output. Raises IndexError if ``chosen`` is too large, ValueError if layers do not fit."""

def rms_norm(x: mx.array, weight: mx.array, eps: float, workers: CpuWorkers) -> mx.array:
    """Returns ``x / sqrt(mean(x ** 2) + eps) * weight`` of rows ``[R, n]``."""

def packed_rows(ids: mx.array, packed: PackedLinear, workers: CpuWorkers) -> mx.array:
    """Returns the unpacked rows ``[T, inputs]`` of a layer for ids ``[T]`` int32: an embedding.

    A row is NaN if its id is negative or not below the layer's outputs: ids are known only at
    evaluation, and an error there would end everything that is evaluated together."""

def choose_tokens(
    raw: mx.array, adjusted: mx.array, choices: mx.array, workers: CpuWorkers
) -> tuple[mx.array, mx.array]:
    """Chooses a token for each row of logits: returns ids ``[R]`` int32 and finite ``[R]`` bool.

    raw: the model's logits ``[R, V]`` float32. finite: whether all raw logits of a row are finite;
    else the id is 0. adjusted: the logits after penalties and constraints, with -inf allowed; may
    be ``raw`` itself, which is then read once. choices: ``[R, 5]`` float32, by column:

    temperature  0 takes the first token of the largest logit; otherwise the tokens' weights are
                 ``exp((logit - max) / temperature)``
    top_k        the number of heaviest tokens to keep, with all as heavy as the last; 0 is off
    top_p        of the kept tokens, the heaviest are kept until they reach this share of the kept
                 weight, with all as heavy as the last; 1 is off
    min_p        the share of the largest weight that a token must have; 0 is off
    draw         in [0, 1): chooses the token at which the sum of the kept weights, in the order
                 of the ids, passes this share of the total

    Sums are in double. A row's id depends on the row and the instruction set alone. Raises
    ValueError for other shapes and types."""

def gather(
    token: mx.array,
    rows: MetalRows,
    segment: int,
    tokens: int,
    layer: Layer,
    kv_heads: int,
    head_dim: int,
    kv_backend: MetalKVBackend,
) -> tuple[mx.array, mx.array]:
    """Returns copies of the keys and the values of the first ``tokens`` rows of a segment's range,
    in any kind of backend: each ``[tokens, kv_heads, head_dim]`` of the layer's dtype."""

def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Returns ``silu(gate) * up`` by element, as one command. Both have one shape and dtype:
    float32, float16 or bfloat16. Computed in float32, rounded once. Raises ValueError for other
    types, IndexError for 0 or over 2**31 elements, at evaluation RuntimeError on a CPU."""

def step_end(arrays: list[mx.array], rows: MetalRows, kv_backend: MetalKVBackend) -> mx.array:
    """Returns the end of a step, its epoch as ``[1]`` uint64. Evaluating the end signals the epoch
    when the device has computed the arrays: the results and each layer's newest ordering handle.

    Raises RuntimeError for evaluating anything else of these rows later, a second end, an operation
    made after the end, or an end before an older step's end."""
