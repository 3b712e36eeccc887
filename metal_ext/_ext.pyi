"""Types of the native extension: memory for K and V on a CPU (POSIX) and on a GPU (Metal), and
MLX primitives that read and write this memory.

Ownership. Python objects may be dropped at any time, because primitives, row tables and queued
operations keep the objects that they use. Address ranges and heaps release their memory when
nothing refers to them.

Threads. Memory operations may be called from any thread. MLX operations are made and evaluated on
the engine's thread. They run on MLX's stream thread and on the threads of ``CpuWorkers``.

Errors are raised when an object or operation is made, before any memory is touched. IndexError
(``std::out_of_range``) means a count or index outside its interval, ValueError arguments that do
not fit together, OSError a refused system call, RuntimeError a bug, such as a block mapped twice.
Evaluation raises RuntimeError if a result finds no memory, or if the stream belongs to the wrong
device: CPU memory needs a CPU stream, a ``MetalKVBackend`` a GPU stream.

Names after the heading "Metal" exist only where ``HAS_METAL`` is true."""

from collections.abc import Sequence
from typing import overload

import mlx.core as mx

HAS_METAL: bool
"""True if this build has the Metal backends. A Metal device need not exist."""

MLX_VERSION: str
SYSTEM_PAGE_BYTES: int
"""The size of a memory page of this system: 4096 on most Linux machines, 16384 on a Mac."""

def instruction_sets() -> list[str]:
    """Return the instruction sets that this machine can run, the best one first: "amx", "bf16",
    "vnni", "avx512", "avx2" and "sse2" on x86-64, "dotprod" and "neon" on arm64."""

class Geometry:
    """The shape of K and V in a group of layers. A region is one layer's K or V. A block is the
    memory of the same consecutive tokens in all regions. Ranges and heaps store one region after
    another, so that adjacent blocks of a heap need one mapping per region."""

    def __init__(
        self,
        *,
        page_bytes: int,
        tokens_per_block: int,
        blocks_per_heap: int,
        blocks_per_range: int,
        region_row_bytes: list[int],
        ring_blocks: int = 0,
    ) -> None:
        """``page_bytes`` is a multiple of SYSTEM_PAGE_BYTES. ``region_row_bytes`` has the bytes of
        one token in each region. In each region, ``tokens_per_block`` tokens must fill whole pages.
        The limits are 4096 regions and 2**46 bytes per range. With ``ring_blocks``, a range has two
        places for each of so many blocks that may be mapped at once (core/geometry.h)."""

class Heap:
    """Physical memory for ``blocks_per_heap`` blocks."""

    @staticmethod
    def shared(geometry: Geometry) -> Heap:
        """Makes a shared-memory file (a memfd; on a Mac a shm object), at first without memory."""
    @staticmethod
    def dense(geometry: Geometry) -> Heap:
        """Makes one private allocation, which gets all its memory when it is mapped."""
    @property
    def committed_bytes(self) -> int:
        """The bytes that the system charges for the heap. Any thread may read this."""

class AddressRange:
    """Contiguous addresses for the K and V of one sequence. Reading a block without memory or
    writing a read-only block ends the process with SIGSEGV."""

    @staticmethod
    def sparse(geometry: Geometry) -> AddressRange:
        """Reserves ``range_bytes`` of addresses, at which blocks of shared heaps can be mapped."""
    @staticmethod
    def dense(geometry: Geometry) -> AddressRange:
        """Makes a range in which one whole dense heap can be mapped, at the heap's addresses."""
    def map(self, heap: Heap, heap_block: int, block: int, count: int, writable: bool) -> None:
        """Maps ``count`` heap blocks, from ``heap_block`` on, at the range's blocks from ``block``
        on. A block of a shared heap may be mapped many times. Raises ValueError for read-only
        mappings in dense ranges, and for ranges of a ``MetalKVBackend``, which only ``Mapper``
        maps. Raises OSError(ENOMEM) and maps nothing if the process may have no more mappings.
        Releases the GIL."""
    def write_block(self, block: int, fd: int, offset: int) -> int:
        """Writes a mapped block's bytes, region by region, to the file at ``offset``. Returns their
        CRC-32C (Castagnoli). The block must stay mapped and unchanged until the call returns. Raises
        RuntimeError for an unmapped block, OSError if the system refuses. Releases the GIL."""
    def read_block(self, block: int, fd: int, offset: int) -> int:
        """Fills a block that is mapped writable with the bytes that ``write_block`` has written, and
        returns their CRC-32C. Raises RuntimeError for another block, OSError if the system refuses,
        with EIO if the file ends too early. Releases the GIL."""
    @property
    def mapped_tokens(self) -> int:
        """The number of tokens of the leading mapped blocks, including read-only blocks."""
    @property
    def base_address(self) -> int:
        """The address of region 0, or 0 for a paged range, or a dense range without a heap."""

class Mapper:
    """A thread that changes mappings in order. Each operation gets a ticket, a rising number."""

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
        """Queues an ``AddressRange.map``, and returns the operation's ticket. A writable mapping
        also allocates memory, if the system can (Linux 5.14), so that later writes take no page
        fault. If the system refuses, ``refused`` returns True. Mapping a mapped block, or a heap of
        another kind, sets ``failure``."""
    def refused(self, ticket: int) -> bool:
        """Returns True, once per ticket, if the system refused a completed ``map`` without changing
        anything; else False. Raises RuntimeError if the operation is not completed."""
    def unmap(self, range: AddressRange, block: int, count: int) -> int:
        """Queues unmapping ``count`` range blocks from ``block`` on, and returns the ticket."""
    def release(self, heap: Heap, block: int, count: int) -> int:
        """Queues releasing the memory of unmapped heap blocks to the system; returns the ticket."""
    @property
    def completed(self) -> int:
        """The newest ticket up to which all operations are done, or 0 at first."""
    @property
    def failure(self) -> str:
        """The first failed operation's message, or "". After a failure, mappings may be wrong."""
    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Waits for a ticket for 0 to 3600 s, without the GIL. Returns False if time runs out."""

class CopyCounter:
    """The number of bytes of K and V that ``block_copy`` has copied."""

    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...

class CpuWorkers:
    """The threads that run CPU kernels for all operations, and the kernels' instruction set."""

    def __init__(
        self, threads: int, instruction_set: str = "auto", activations: str = "float32"
    ) -> None:
        """``threads`` is 1 to 256, including the caller's. ``activations`` is the type to which
        products of packed weights may round their input: "float32", or if supported "bfloat16" or
        "int8"."""
    @property
    def threads(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...

class RowTable:
    """The addresses of a step's rows; a row is one token of the step.

    ``segments`` holds ``(range, start, count)`` of each sequence: the next ``count`` rows of the
    step are the range's positions from ``start`` on. All blocks before ``start + count`` must be
    mapped, which this class checks and kernels do not. The limits are 2**24 rows and positions
    below 2**31.

    A table keeps addresses reserved, but not mappings. Blocks may be unmapped only after the step
    has completed: otherwise kernels end in SIGSEGV."""

    def __init__(self, segments: list[tuple[AddressRange, int, int]]) -> None: ...
    def __len__(self) -> int: ...

class Layer:
    """The indices of a layer's K and V regions; their dtype is bfloat16, float32 or (Metal)
    float16."""

    def __init__(self, key_region: int, value_region: int, dtype: mx.Dtype) -> None: ...

class Softmax:
    """The way in which a layer's attention makes weights of scores."""

    def __init__(
        self,
        scale: float,
        *,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: mx.array | None = None,
    ) -> None:
        """A score is ``query . key * scale``; with a ``softcap``, softcap * tanh(that / softcap). A
        row sees the ``window`` newest positions, its own included; None means all. ``sinks``
        ``[query_heads]`` float32 are logits of keys without values. Raises IndexError for a window
        below 1, ValueError for a negative softcap or sinks of another shape or type."""
    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...
    @property
    def softcap(self) -> float: ...
    @property
    def sinks(self) -> mx.array | None: ...

# Below, ``token`` is a layer's ordering handle, an array of one element. ``append`` returns the
# next handle, and operations that read K and V take the newest one, so that reads wait for writes.
# Sums are in float32, in an order that depends on a row's position alone. So a row's result has the
# same bits in any batch, in decode and chunk calls, and with any number of threads.

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
    """Writes row i of keys and values to the place of the step's row i. Returns the next handle.
    Keys and values are ``[len(rows), kv_heads, head_dim]`` in float32 or bfloat16 (on Metal also
    float16), with any strides. Raises IndexError for rows in read-only blocks."""

@overload
def decode_attention(
    token: mx.array,
    queries: mx.array,
    rows: MetalRows,
    first_row: int,
    layer: Layer,
    kv_heads: int,
    softmax: Softmax,
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
    softmax: Softmax,
    workers: CpuWorkers,
) -> mx.array:
    """Returns the softmax attention of R rows from row ``first_row`` on. Each row attends to its
    sequence's positions from the first that it sees to its own; memory before that is not read.
    Queries and result are ``[R, query_heads, head_dim]`` in float32 or bfloat16 (on Metal also
    float16). ``query_heads`` is a multiple of ``kv_heads``. head_dim is 32 (not on Metal), 64, 128
    or 256. Slow for many rows of one sequence."""

def chunk_attention(
    token: mx.array,
    queries: mx.array,
    rows: RowTable,
    segment: int,
    layer: Layer,
    kv_heads: int,
    softmax: Softmax,
    workers: CpuWorkers,
) -> mx.array:
    """Returns the result of ``decode_attention`` for the rows of one segment,
    ``[count, query_heads, head_dim]``. This function is fast for many rows of one sequence."""

def region_view(
    token: mx.array,
    range: AddressRange,
    region: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: mx.Dtype,
    kv_backend: MetalKVBackend | None = None,
    first: int = 0,
) -> mx.array:
    """Returns a region's rows [first, tokens), ``[tokens - first, kv_heads, head_dim]``, without a
    copy. The view must not be read after the rows are unmapped. ``kv_backend`` is needed on Metal.
    Raises ValueError for a paged range, and RuntimeError for a sparse range whose newest step has
    one row and is not complete; ``gather`` works in both cases."""

def uncounted(array: mx.array, *, transposable: bool) -> mx.array:
    """Returns an alias: an array with the same memory. When MLX adds up the numbers that a command
    buffer uses, the alias counts as none. Matrix products, lookups of rows and casts may read it.
    With ``transposable``, they may also read its transposed views, and arithmetic by element may
    read it, but lookups of rows are slower. Raises ValueError for an array that has not been
    evaluated."""

def block_copy(
    token: mx.array,
    source: AddressRange,
    source_block: int,
    target: AddressRange,
    target_block: int,
    tokens: int,
    counter: CopyCounter,
) -> mx.array:
    """Copies the first ``tokens`` rows of a block, in all regions, to a writable block, and adds
    the number of bytes to the counter. Returns the next ordering handle."""

# --- Metal: where HAS_METAL is true ----------------------------------------------------------------

def metal_capabilities() -> dict[str, bool | int | str | list[str]]:
    """Return the properties of the default Metal device, or {} if there is no device."""

class MetalKVBackend:
    """The heaps and ranges of one kind and geometry on the default Metal device. Only a ``Mapper``
    maps and unmaps them. Only the engine's thread may call methods."""

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
        """``kind`` is "sparse", "paged" or "dense". A command of the device that takes over
        ``timeout_s`` (0 to 3600) has failed for good. ``max_buffer_bytes`` limits one Metal buffer,
        of which a sparse range may need several; 0 means the device's limit. Memory stays resident
        for ``residency_keep_s`` (0 to 86400) after its last use.

        With ``maps_beside_steps``, mappings of sparse ranges may change while steps run. Without,
        operations of ``Mapper`` fail while a step runs, and ``finish_mappings`` must precede
        ``rows``. Raises RuntimeError with everything that the device lacks."""
    def hold(self, arrays: list[mx.array]) -> None:
        """Keeps evaluated arrays (weights) resident on the GPU. Call once, before the first step.
        Raises ValueError if an array is not evaluated, OSError(ENOMEM) if the device refuses."""
    def new_heap(self) -> Heap:
        """Raises OSError(ENOMEM) if the device refuses. Releases the GIL."""
    def new_range(self) -> AddressRange:
        """Raises OSError(ENOMEM) if the device refuses. Releases the GIL."""
    def finish_mappings(self, mapper: Mapper) -> int:
        """Queues a wait for all mappings that were queued before; returns the wait's ticket."""
    def commit_heap(self, mapper: Mapper, heap: Heap) -> int:
        """Queues allocating a released heap's memory again; returns the ticket. The
        allocation may be ``refused``."""
    def rows(self, segments: list[tuple[AddressRange, int, int]]) -> MetalRows:
        """Returns the rows of the next step, as described by ``RowTable``, and begins its epoch,
        which ``step_end`` or ``abandon`` must end. Raises RuntimeError if a row is in a shared
        block."""
    def make_slots(self, count: int, slot_bytes: int) -> None:
        """Makes ``count`` state slots, once, before the first step. Raises RuntimeError at a second
        call, or if a dense backend's slots exceed one buffer."""
    def commit_slot(self, slot: int) -> int:
        """Allocates a slot's memory before a step uses the slot. Returns the bytes of all slots
        with memory. Raises OSError(ENOMEM) if the device refuses."""
    def write_slot(self, slot: int, fd: int, offset: int) -> int:
        """Writes a slot's bytes to a file, as ``AddressRange.write_block`` does. Raises RuntimeError
        for a slot without memory."""
    def read_slot(self, slot: int, fd: int, offset: int) -> int:
        """Fills a slot from a file, as ``AddressRange.read_block`` does. A step may read the slot
        then. Raises RuntimeError for a slot without memory."""
    def state_rows(
        self,
        rows: MetalRows,
        segments: list[tuple[int, int | None, list[tuple[int, int]]]],
    ) -> MetalStateRows:
        """Returns the state slots of a step. ``segments`` holds ``(count, read, writes)`` of each
        sequence in the order of the rows. ``read`` is a slot, or None for zeros. ``writes`` holds
        ``(n, slot)``, ascending: the slot gets the states after n rows; rows after the last n are
        drafts. The last slot may be the slot that is read. Raises RuntimeError if a slot is read
        before any write, is written twice, or may be used by another sequence's step."""
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
        """Queues copying the first ``tokens`` rows of a block, in all regions, to a writable block.
        Returns the ticket. The steps that wrote the rows must have completed."""
    def abandon(self, rows: MetalRows) -> None:
        """Notes that the step has failed and ended. The step's epoch counts as completed."""
    @property
    def completed_epoch(self) -> int:
        """The newest epoch up to which all steps have completed, or 0 at first."""
    @property
    def late_signals(self) -> int:
        """The number of mapping points that waited for a step's signal, up to a second."""
    @property
    def command_buffers(self) -> int:
        """The number of MLX's command buffers so far with a command over this memory."""
    @property
    def buffers_per_range(self) -> int: ...
    @property
    def failure(self) -> str:
        """The command that the device did not finish in time, or "". If set, no result is valid."""
    def shutdown(self) -> bool:
        """Waits for all steps, then unmaps and releases everything. Returns False if the device did
        not answer; the process must then end at once. Releases the GIL."""

class MetalRows:
    """The addresses of one step's rows, and the step's epoch (its number)."""

    def __len__(self) -> int: ...
    @property
    def epoch(self) -> int: ...

class MetalStateRows:
    """The state slots that the sequences of one step read and write."""

class StoredMatrix:
    """The matrix of a linear layer, or a stack of experts' matrices, as the Metal kernels multiply
    it. Keeps ``uncounted`` aliases of its arrays."""

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        bias: mx.array | None = None,
        *,
        bits: int = 0,
        group_size: int = 0,
        mode: str = "affine",
    ) -> None:
        """``weight`` is ``[outputs, inputs]``, of float32, float16 or bfloat16, or with ``bits`` of
        MLX's codes: affine with 4 or 8 bits in groups of 32, 64 or 128, or "mxfp4". ``bias`` is the
        linear layer's, ``[outputs]``. In a stack, the first axis of each array is the expert.
        ``inputs`` is a multiple of 16. Raises ValueError for other formats, and for arrays that are
        not evaluated, not in row-major order, or not aligned to 16 bytes."""
    @property
    def dtype(self) -> mx.Dtype | None:
        """The dtype of activations in products; None if any float will do."""

class Mixture:
    """The weights of a mixture's experts, as ``mixture`` computes them."""

    def __init__(
        self,
        gate_up: Sequence[StoredMatrix],
        down: StoredMatrix,
        shared: Sequence[StoredMatrix],
        *,
        chosen: int,
        normalised: bool,
        kind: str = "silu",
    ) -> None:
        """``gate_up`` has the stacks of gate and up, or one whose experts have both. ``shared`` has
        the shared expert's gate, up and down, or nothing. ``chosen`` experts, 32 at most, compute a
        row. If ``normalised``, their weights add up to 1. Raises ValueError for sizes that do not
        fit, over 512 experts, gate and up of two formats, and a shared expert of another format or
        size than the others, or with biases; IndexError for ``chosen``."""
    @property
    def dtype(self) -> mx.Dtype | None:
        """The dtype of activations; None if any float will do."""
    @property
    def has_shared(self) -> bool: ...

class RopeTable:
    """The rotation of queries and keys by their positions (RoPE)."""

    def __init__(self, frequencies: Sequence[float], magnitude: float = 1.0) -> None:
        """At position p, dimensions i and ``i + pairs`` of a head rotate together by
        ``p * frequencies[i]`` radians. ``pairs`` is the number of frequencies, 1 to 128.
        ``magnitude`` multiplies the rotated dimensions. Raises ValueError if frequencies are too
        many or not finite."""

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
    """Applies RMS norms over head_dim, then RoPE, to queries and keys; either may be None. Writes
    keys and values as ``append`` does. Returns the next ordering handle and the queries.

    Queries are ``[len(rows), query_heads, head_dim]``. Keys and values are
    ``[len(rows), kv_heads, head_dim]``, of the same dtype. ``norms`` are the weights of queries and
    of keys, ``[head_dim]`` float32, and the epsilon. Raises ValueError if rope has more dimensions
    than a head."""
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
    """Does on the CPU, in float32, what the first overload does on a GPU. Queries, keys and values
    are float32 or bfloat16 with any strides. Views of one matrix are not copied. The returned
    queries keep the dtype. ``angles`` is the result of ``rope_angles``."""

def rope_angles(rows: RowTable, rope: RopeTable, workers: CpuWorkers) -> mx.array:
    """Returns the rotation of each row, ``[len(rows), 2 * pairs]`` float32: the cosines of all
    pairs, then the sines, both times the magnitude, computed in double precision."""

class StateMemory:
    """Memory at a fixed address for state slots, zero until written. Access past its end ends the
    process."""

    def __init__(self, bytes: int) -> None:
        """``bytes`` is rounded up to pages. Raises OSError if the system refuses the addresses."""
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def release(self, offset: int, bytes: int) -> None:
        """Releases whole pages, which then hold zeros. Raises ValueError for parts of pages."""
    def committed(self, offset: int, bytes: int) -> int:
        """Returns how many of these bytes occupy memory. Raises ValueError for parts of pages."""
    def write_record(self, offset: int, bytes: int, fd: int, file_offset: int) -> int:
        """Writes these bytes to a file, as ``AddressRange.write_block`` does."""
    def read_record(self, offset: int, bytes: int, fd: int, file_offset: int) -> int:
        """Fills these bytes from a file, as ``AddressRange.read_block`` does."""

class StateRows:
    """The addresses of the state slots that the sequences of one step read and write."""

    def __init__(
        self,
        segments: list[tuple[int, int, list[tuple[int, int]]]],
        memories: list[StateMemory],
    ) -> None:
        """``segments`` has ``(count, read, [(n, write), ...])`` of each sequence in the order of
        the rows. ``read`` is the address of the slot with the states before the rows, or 0 for
        zeros. The slot at address ``write`` gets the states after the first n rows. The n ascend;
        rows after the last are drafts. The last ``write`` may equal ``read``. Raises IndexError if
        a slot is in none of ``memories``."""
    def __len__(self) -> int: ...

class GatedDelta:
    """The weights and sizes of a gated delta net, a recurrent layer, without its projections."""

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
        multiples of 16, at most 256. Arrays are float32. ``conv`` is
        ``[tail_rows + 1, conv_width]``, the newest token's weights last; conv_width is
        ``2 * key_heads * key_dim + value_heads * value_dim``. ``a_log`` and ``dt_bias`` are
        ``[value_heads]``; ``norm`` is ``[value_dim]``."""

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
    """Computes a gated delta net between its projections. Returns the next ordering handle and
    ``RMSNorm(y) * SiLU(z)`` in z's shape.

    ``qkv`` has queries, keys and values before the convolution, ``[len(rows), conv_width]``. ``z``
    is ``[len(rows), value_heads * value_dim]``; ``a`` and ``b`` are ``[len(rows), value_heads]``.
    All are float32. Views of one matrix are not copied. At ``offset`` bytes, a slot holds the state
    S ``[value_heads][value_dim][key_dim]``, then the newest rows of qkv
    ``[tail_rows][conv_width]``.

    Queries and keys are scaled to unit vectors, queries also by ``key_dim ** -0.5``. For each token
    and value head: ``S = S * exp(-exp(a_log) * softplus(a + dt_bias))``,
    ``S += (v - S k) * sigmoid(b) k^T``, ``y = S q``. Results depend neither on the division of
    tokens into steps nor on other sequences. Raises IndexError if a slot is too small."""
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
    """Does on a GPU what the first overload does on the CPU, for a key_dim and value_dim of 128.
    All arrays and the rows of qkv in slots have one dtype: float32, float16 or bfloat16. ``offset``
    is a multiple of 16. Evaluation raises ValueError if qkv or z lies at an odd place in a buffer,
    between multiples of four numbers."""

class PackedLinear:
    """A copy of a linear layer's weights, in the order in which the CPU's kernels read them."""

    def __init__(
        self,
        weights: list[mx.array],
        workers: CpuWorkers,
        codes: list[tuple[mx.array, mx.array | None, int, int] | None],
        exact: bool = False,
    ) -> None:
        """``weights`` are ``[outputs, inputs]`` in float32, bfloat16, or float16 (stored as
        float32). Several weights become one layer, with their outputs one after the other.
        ``codes`` is empty, or has an item per weight: None, or
        ``(scales, biases, bits, group_size)`` for uint32 words of ``mx.quantize`` in mode affine or
        mxfp4 (without biases).

        Codes are stored in 4 or 8 bits. All weights of a layer are stored in the widest of their
        types, mxfp4 beside other codes in 8 bits. With ``exact``, products do not round their
        input. Raises ValueError if weights cannot be packed, OSError if memory is short."""
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def packed_bytes(inputs: int, matrices: list[tuple[int, mx.Dtype, int, int]]) -> int:
    """Return ``nbytes`` of a PackedLinear. ``matrices`` has a tuple per weight: the number of
    outputs, the dtype of weights or scales, the bits and the group size of codes (0 without
    codes)."""

class PackedExperts:
    """The weights of one linear layer of a mixture of experts: a PackedLinear for each expert."""

    def __init__(
        self,
        weights: list[mx.array],
        workers: CpuWorkers,
        codes: list[tuple[mx.array, mx.array | None, int, int] | None],
    ) -> None:
        """The parameters are those of PackedLinear, but weights are ``[experts, outputs, inputs]``,
        and scales and biases ``[experts, outputs, groups]``."""
    @property
    def nbytes(self) -> int: ...

# Products of packed layers are float32, with each sum in the order of the inputs. A row's result
# has the same bits in any batch and with any number of threads, for one instruction set. The error
# is at most 1e-5 of the sum of the products' magnitudes, as native tests check.

def linear(
    x: mx.array,
    packed: PackedLinear,
    workers: CpuWorkers,
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    residual: mx.array | None = None,
) -> mx.array:
    """Returns ``x @ W.T``, ``[R, outputs]``, for x ``[R, inputs]``. With ``norm``, an RMS norm with
    this weight ``[inputs]`` is applied to x first. ``residual``, ``[R, outputs]``, is added."""

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
    """Splits the result of ``linear`` into one array ``[R, count, outputs // sum(heads)]`` for each
    count in ``heads``. Raises IndexError for more heads than outputs, and ValueError if the outputs
    cannot be divided evenly."""

def gated_mlp(
    x: mx.array,
    norm: mx.array,
    eps: float,
    gate_up: PackedLinear,
    down: PackedLinear,
    workers: CpuWorkers,
    *,
    gate: str = "silu",
    adds: bool = True,
) -> mx.array:
    """Returns ``down(silu(gate(y)) * up(y))``, and with ``adds`` x besides, where y is the RMS norm
    of x ``[R, hidden]``. ``gate_up`` is one layer with the outputs of gate, then those of up.

    ``gate`` "gelu_tanh" is gelu, approximated by tanh, instead of silu. "clamped_silu" is
    ``g * sigmoid(1.702 * g) * (u + 1)`` of ``g = min(gate(y), 7)`` and u, up(y) clamped to -7 and
    7. Raises ValueError for other names."""

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
    *,
    gate: str = "silu",
    biases: tuple[mx.array, mx.array, mx.array] | None = None,
) -> mx.array:
    """Returns ``x + sum(weight * down(silu(gate(y)) * up(y)))``, summed over the experts that the
    router chooses for each row, the best one first. y is the RMS norm of x ``[R, hidden]``.

    The router has one output per expert. The weights are the ``chosen`` largest of the softmax over
    all experts; lower numbers win ties. With ``normalised``, weights are divided by their sum.
    ``shared`` holds gate_up and down of an expert for all rows, whose result is multiplied by the
    sigmoid of a further router output. ``gate`` is as in ``gated_mlp``. ``biases``, float32, are of
    the router ``[experts]``, of gate and up ``[experts, 2 * inner]``, and of down
    ``[experts, hidden]``; a mixture with a shared expert has none. Raises IndexError if ``chosen`` is too large, ValueError if
    layers do not fit each other."""

def rms_norm(
    x: mx.array,
    weight: mx.array,
    eps: float,
    workers: CpuWorkers,
    *,
    residual: mx.array | None = None,
) -> mx.array:
    """Returns ``x / sqrt(mean(x ** 2) + eps) * weight`` of rows ``[R, n]``, plus ``residual``."""

def packed_rows(ids: mx.array, packed: PackedLinear, workers: CpuWorkers) -> mx.array:
    """Returns row ``id`` of the unpacked weights for each of ``ids``, ``[T]`` int32, as an
    embedding ``[T, inputs]``. For an id that is no row's number, the result is NaN instead of an
    error: ids are known only at evaluation, where an error would end all other operations too."""

def choose_tokens(
    raw: mx.array,
    adjusted: mx.array,
    choices: mx.array,
    noise_keys: mx.array,
    noise: mx.array,
    workers: CpuWorkers,
) -> tuple[mx.array, mx.array]:
    """Chooses a token for each row of logits. Returns ids ``[R]`` int32 and ``[R]`` bool, which is
    False for a row whose raw logits are not all finite: its id is 0.

    ``raw`` are the model's logits ``[R, V]`` float32. ``adjusted`` are the logits after penalties
    and constraints, which may be -inf; pass ``raw`` itself if there are none. ``choices`` is
    ``[R, 4]`` float32, with these columns:

    temperature  0 takes the first token of the largest logit; otherwise a token's score is
                 ``(logit - max) / temperature``, and its weight ``exp(score)``
    top_k        keep this many heaviest tokens, and those as heavy as the last of them; 0 is off
    top_p        of these, keep the heaviest until they have this share of the kept weight, and
                 those as heavy as the last of them; 1 is off
    min_p        keep tokens with at least this share of the largest weight; 0 is off

    Of the tokens that are kept, the first with the largest score plus noise is taken. A token's id
    is hashed with the row's part of ``noise_keys``, ``[R, 2]`` uint32. ``noise`` is the values and
    slopes of hashes' noise, ``[2, 65536]`` float32 (``engine/step/sampler.py`` says how).

    Sums are in double precision. A row's id depends on nothing but the row, and where tokens are
    filtered on the instruction set.
    Raises ValueError for other shapes and types."""

def gather(
    token: mx.array,
    rows: MetalRows,
    segment: int,
    first: int,
    tokens: int,
    layer: Layer,
    kv_heads: int,
    head_dim: int,
    kv_backend: MetalKVBackend,
) -> tuple[mx.array, mx.array]:
    """Copies ``tokens`` rows of a segment's range, from ``first`` on. Returns the keys and the values, each
    ``[tokens, kv_heads, head_dim]`` of the layer's dtype. Works in any kind of backend."""

def multiply(
    x: mx.array, matrices: Sequence[StoredMatrix], residual: mx.array | None = None
) -> list[mx.array]:
    """Returns ``x . W^T + bias`` for each matrix, in one command for up to four of one format. x is
    ``[rows, inputs]``. ``residual``, with one matrix, is added to the rounded product. A row's bits
    do not depend on the number of rows. Slow for many rows, as each four read the matrices again.
    Raises ValueError for other shapes and dtypes. Evaluation on a CPU raises RuntimeError."""

def multiply_gated(
    x: mx.array, gate: StoredMatrix, up: StoredMatrix, *, kind: str = "silu"
) -> mx.array:
    """Returns what a gate of ``gated_mlp`` makes of x's products with two matrices, in one command.
    Raises ValueError if they have different formats, or biases. Otherwise like ``multiply``."""

def mixture(
    x: mx.array,
    residual: mx.array,
    logits: mx.array,
    mixture: Mixture,
    shared_gate: mx.array | None = None,
) -> mx.array:
    """Returns ``residual`` plus the chosen experts' outputs by weight, and the shared expert's by
    ``sigmoid(shared_gate)``, in four commands. x and ``residual`` are ``[rows, hidden]``. The
    softmax of ``logits [rows, experts]``, rounded to its dtype, gives the weights; of equal experts
    the one with the lower number is chosen. ``shared_gate`` is ``[rows, 1]``. An expert's weights
    are read once for four rows. A row's bits do not depend on the number of rows. Raises ValueError
    for other shapes and dtypes, IndexError if rows times ``chosen`` exceed 1024. Evaluation on a CPU
    raises RuntimeError."""

def step_end(arrays: list[mx.array], rows: MetalRows, kv_backend: MetalKVBackend) -> mx.array:
    """Returns the end of a step, an array ``[1]`` uint64 with the epoch. Evaluating it signals the
    epoch when the device has computed ``arrays``: the results and each layer's newest handle.

    Raises RuntimeError for a second end of these rows, for an end before an older step's end, and
    when operations over these rows are made or evaluated after their end."""
