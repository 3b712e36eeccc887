"""The native surface: memory of the POSIX and Metal substrates, and MLX primitives over it.

Ownership. Python objects here are handles: primitives, row tables and queued operations keep what
they use alive, so that a handle may be dropped at any time. Address ranges and heaps give their
memory back when nothing holds them.

Threads. Memory operations may be called from any thread. The MLX operations follow MLX's rule: they
are built and evaluated on one thread, the engine's; their work runs on MLX's stream thread and on
the threads of ``CpuWorkers``. ``Mapper`` has one thread of its own.

Errors. A count or index outside its interval is an ``IndexError`` (``std::out_of_range``), a
combination that cannot work a ``ValueError``, a refused system call an ``OSError`` with its errno:
all are raised when the object or operation is made, before any memory is touched, and name the
figure. A block that is mapped twice, or unmapped without memory, is a ``RuntimeError``: a bug. A
result without memory is one, too; it is found only when the operation is evaluated.

An operation runs where its rows are. Rows of the POSIX substrate need a CPU stream, rows of a
``MetalSubstrate`` a GPU stream: on any other it is a ``RuntimeError`` when it is evaluated.

Metal. The names below "Metal" exist at run time only where ``HAS_METAL`` is true.
"""

from collections.abc import Sequence
from typing import overload

import mlx.core as mx

HAS_METAL: bool
"""True where this build has the Metal substrates. ``metal_capabilities`` asks the machine."""

MLX_VERSION: str
"""The MLX that the extension was compiled against."""
SYSTEM_PAGE_BYTES: int
"""The MMU page of this system: 4096 on most Linux machines, 16384 on a Mac."""

def instruction_sets() -> list[str]:
    """The instruction sets that this machine can run, the best one first.

    "amx", "bf16", "vnni", "avx512", "avx2" and "sse2" on x86-64, "dotprod" and "neon" on arm64.
    """

class Geometry:
    """Bytes of one group of regions. A block is the same run of tokens in every region.

    A range is region-major, ``[region][block]``, one contiguous array per region; a heap likewise,
    so that consecutive blocks of a heap take one mapping per region.
    """

    def __init__(
        self,
        *,
        page_bytes: int,
        tokens_per_block: int,
        blocks_per_heap: int,
        blocks_per_range: int,
        region_row_bytes: list[int],
    ) -> None:
        """page_bytes: a multiple of SYSTEM_PAGE_BYTES. region_row_bytes: bytes of one token, one
        entry per region; ``tokens_per_block`` rows must be whole pages. At most 4096 regions and
        2**46 bytes of range.
        """
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
        """A shared-memory file (memfd; an unlinked shm object on a Mac), empty until written."""
    @staticmethod
    def dense(geometry: Geometry) -> Heap:
        """One private allocation, committed in full when it is mapped."""
    @property
    def committed_bytes(self) -> int:
        """The bytes that the system charges for it now: ``st_blocks`` for a memfd. Any thread."""

class AddressRange:
    """Contiguous addresses of one sequence.

    Reading a block without memory is SIGSEGV, and so is writing to a read-only one.
    """

    @staticmethod
    def sparse(geometry: Geometry) -> AddressRange:
        """Reserves ``range_bytes`` of addresses; takes blocks of shared heaps."""
    @staticmethod
    def dense(geometry: Geometry) -> AddressRange:
        """Takes one dense heap whole; its addresses are the heap's."""
    def map(self, heap: Heap, heap_block: int, block: int, count: int, writable: bool) -> None:
        """Puts heap blocks ``[heap_block, + count)`` behind range blocks ``[block, + count)``.

        A block of a shared heap may stand at any number of places. Dense ranges are writable:
        anything else is a ValueError, and so is a range of a ``MetalSubstrate``, which ``Mapper``
        maps. Releases the interpreter lock. OSError(ENOMEM) where the system has no mapping left;
        then nothing is changed.
        """
    @property
    def mapped_tokens(self) -> int:
        """Tokens of the leading blocks that have memory, read-only ones included."""
    @property
    def base_address(self) -> int:
        """Address of region 0 as the kernels take it; 0 where it has none: a dense range without a
        heap, and a paged one."""

class Mapper:
    """Changes mappings on its own thread, in order. Tickets rise by one and complete in order."""

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
        """Queues an ``AddressRange.map``; returns its ticket.

        Where it is writable the memory is committed too: a write after its completion takes no page
        fault, where the system can commit ahead (Linux 5.14) and has the memory. ``refused`` says
        whether the mapping itself came about; a block that is mapped already, or a heap of another
        kind, is the mapper's failure.
        """
    def refused(self, ticket: int) -> bool:
        """Whether the system refused that ``map``, which has then changed nothing.

        True for the first call alone; False for any other operation. RuntimeError when the ticket
        is not completed.
        """
    def unmap(self, range: AddressRange, block: int, count: int) -> int:
        """Queues the unmapping of range blocks ``[block, + count)``; returns its ticket."""
    def release(self, heap: Heap, block: int, count: int) -> int:
        """Queues giving the memory of unmapped heap blocks back to the system."""
    @property
    def completed(self) -> int:
        """The newest ticket such that it and all before it are done; 0 at first."""
    @property
    def failure(self) -> str:
        """The words of the first failed operation, or "". After one, mappings are in doubt."""
    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Waits without the interpreter lock; False when ``timeout_s`` (0 to 3600) passed first."""

class CopyCounter:
    """Counts the K and V bytes that ``block_copy`` has copied."""

    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...

class CpuWorkers:
    """Threads and instruction set of the CPU kernels; shared by all operations of an engine."""

    def __init__(
        self, threads: int, instruction_set: str = "auto", activations: str = "float32"
    ) -> None:
        """threads: 1 to 256, the caller's included. activations: what products of packed weights
        may round x to, float32, bfloat16 or int8, where the instruction set has such products."""
    @property
    def threads(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...

class RowTable:
    """The places of the rows of a step's flat token array.

    segments: ``(range, start, count)``: the next ``count`` rows stand at positions
    ``[start, start + count)`` of the range. Making it checks that all of ``[0, start + count)``
    has memory, so that kernels need no check. Rows in read-only blocks can be read with it, but
    not appended. At most 2**24 rows, at positions below 2**31.

    It keeps the addresses alive, not the mappings: what is made of it must have been evaluated
    before a block below ``start + count`` is unmapped, else it ends in SIGSEGV. No check could see
    that coming, as ``Mapper`` unmaps on its own thread while operations run. Wait for the step's
    epoch before unmapping.
    """

    def __init__(self, segments: list[tuple[AddressRange, int, int]]) -> None: ...
    def __len__(self) -> int: ...

class Layer:
    """The regions of one layer and the dtype of their numbers: bfloat16 or float32, and float16 on
    Metal."""

    def __init__(self, key_region: int, value_region: int, dtype: mx.Dtype) -> None: ...

# In all that follows, `token` is the layer's cache token, any array of one element: append()
# returns its successor, and what reads the layer takes the newest one. That orders reads after
# writes. Sums are kept in float32, in an order that depends on a row's position alone, so that a
# row's result has the same bits in any batch, in a decode or a chunk call, on any number of
# threads of one instruction set.

@overload
def append(
    token: mx.array,
    keys: mx.array,
    values: mx.array,
    rows: MetalRows,
    layer: Layer,
    workers: MetalSubstrate,
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
    """Writes row i of keys and values at the place of row i of the table; returns the new token.

    keys, values: ``[len(rows), kv_heads, head_dim]`` float32 or bfloat16 (on Metal float16 too),
    any strides; rounded to nearest even where the layer keeps fewer bits. IndexError where a row of
    the table lies in a read-only block.
    """

@overload
def decode_attention(
    token: mx.array,
    queries: mx.array,
    rows: MetalRows,
    first_row: int,
    layer: Layer,
    kv_heads: int,
    scale: float,
    workers: MetalSubstrate,
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
    """Softmax attention of R rows, each over positions 0 up to its own.

    queries: ``[R, query_heads, head_dim]`` float32 or bfloat16 (on Metal float16 too) for rows
    ``[first_row, + R)`` of the table. ``query_heads`` is a multiple of ``kv_heads``; head_dim is
    32, 64, 128 or 256, on Metal not 32. Returns the same shape and dtype. Made for one row per
    sequence, correct for any.
    """

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
    """The same as ``decode_attention`` for all rows of one segment; made for many.

    queries: ``[count, query_heads, head_dim]`` of segment number ``segment`` of the table.
    """

def region_view(
    token: mx.array,
    range: AddressRange,
    region: int,
    tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: mx.Dtype,
    substrate: MetalSubstrate | None = None,
) -> mx.array:
    """The first ``tokens`` rows of a region as ``[tokens, kv_heads, head_dim]``, without a copy.

    The view keeps the addresses alive, not the mapping: it must not be read once the rows are
    unmapped. substrate: whose range it is, where it is one of Metal's; ValueError where that is
    paged, whose rows lie in no one array (see ``gather``). RuntimeError where it is sparse, and the
    range's newest step has one row of it and has not completed: ``gather`` alone waits for that.
    """

def block_copy(
    token: mx.array,
    source: AddressRange,
    source_block: int,
    target: AddressRange,
    target_block: int,
    tokens: int,
    counter: CopyCounter,
) -> mx.array:
    """Copies the first ``tokens`` rows of a block in every region; returns the new token.

    Adds the bytes to the counter when it has run. Both blocks must be mapped, the target writable.
    """

# --- Metal: where HAS_METAL is true ----------------------------------------------------------------

def metal_capabilities() -> dict[str, bool | int | str | list[str]]:
    """Return the properties of the default device; {} where there is no device."""

class MetalSubstrate:
    """Heaps and ranges of one kind and geometry on the default Metal device.

    Its heaps and ranges are mapped and unmapped through a ``Mapper`` alone, so that no call waits
    for the device. Everything here is for the engine's thread, except ``copy_block``'s work, which
    runs on the mapper's.
    """

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
        """kind: "sparse", "paged" or "dense". max_ranges: how many ranges there may be at once.
        timeout_s: how long the device may take for anything (0 to 3600); after that the substrate
        has failed for good. max_buffer_bytes: 0 for the device's own limit; less of it makes a
        sparse range of more buffers. residency_keep_s: how long after the last use the device's
        memory is kept ready for the next one, by a thread of its own (0 to 86400).
        maps_beside_steps: whether a sparse substrate may change mappings while steps are in flight.
        Where it may not, ``Mapper.map``, ``unmap`` and ``release`` fail while one is, maps count
        when ``finish_mappings`` has, and ``rows`` before that is a RuntimeError. RuntimeError that
        names everything that the device lacks for that kind.
        """
    def hold(self, arrays: list[mx.array]) -> None:
        """Keeps evaluated arrays ready as well, the weights, for as long as the substrate lives.

        Once, before the first step. ValueError for an array that is not evaluated; OSError(ENOMEM)
        where the device refuses.
        """
    def new_heap(self) -> Heap:
        """Memory for ``blocks_per_heap`` blocks; OSError(ENOMEM) where the device refuses. Releases
        the interpreter lock, as does ``new_range``."""
    def new_range(self) -> AddressRange:
        """Addresses for one sequence; OSError(ENOMEM) where the device refuses."""
    def finish_mappings(self, mapper: Mapper) -> int:
        """Queues the wait for all maps that were queued before; returns its ticket."""
    def commit_heap(self, mapper: Mapper, heap: Heap) -> int:
        """Queues making the memory of a heap that was released, if it was; returns the ticket, which
        is ``refused`` where the device refuses."""
    def rows(self, segments: list[tuple[AddressRange, int, int]]) -> MetalRows:
        """The rows of the next step, as ``RowTable`` says them. Opens its epoch: ``step_end`` or
        ``abandon`` must close it, before those of later steps. RuntimeError where a row would be
        written in a block that others share."""
    def make_cells(self, count: int, cell_bytes: int) -> None:
        """Memory for the states of recurrent layers, as long as the substrate lives: ``count`` cells
        at fixed addresses. Once, before the first step. RuntimeError where a dense substrate's lie
        in no one buffer, or the second time; OSError(ENOMEM) where the device refuses."""
    def state_rows(
        self,
        rows: MetalRows,
        segments: list[tuple[int, int | None, list[tuple[int, int]]]],
    ) -> MetalStateRows:
        """The cells of the step of these rows: (count, cell that is read, writes) of every
        sequence, in the order of its rows; None reads zeros. writes: ``(rows, cell)``, rising: after
        ``rows`` rows the state is written there; the last one is after all rows, and may be the cell
        that was read. RuntimeError where a cell is read that nothing has written, is written twice,
        or is written while a step that has not completed may touch it for another sequence."""
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
        """Queues a copy of the first ``tokens`` rows of a block in every region; returns its
        ticket. The steps that wrote them must have completed. Both blocks must be mapped, the
        target writable.
        """
    def abandon(self, rows: MetalRows) -> None:
        """The step failed and nothing of it runs any more: its epoch counts as complete."""
    @property
    def completed_epoch(self) -> int:
        """All steps up to this one have completed; 0 at first."""
    @property
    def buffers_per_range(self) -> int: ...
    @property
    def failure(self) -> str:
        """The command that the device did not finish in time, or "". After that nothing may be
        trusted."""
    def shutdown(self) -> bool:
        """Ordered end: waits for the steps, unmaps, releases. False where the device did not
        answer in time: the process must then end without releasing anything. Releases the
        interpreter lock."""

class MetalRows:
    """The places of the rows of one step's flat token array, and the step's epoch."""

    def __len__(self) -> int: ...
    @property
    def epoch(self) -> int: ...

class MetalStateRows:
    """The cells that the rows of one step read and write."""

class RopeTable:
    """How heads turn, for all positions."""

    def __init__(self, frequencies: Sequence[float], magnitude: float = 1.0) -> None:
        """frequencies: ``[pairs]``; of a head's first ``2 * pairs`` dimensions i and ``i + pairs``
        turn against each other by ``position * frequencies[i]`` radians, and the others do not turn.
        magnitude: what those that turn are multiplied by when they have. ValueError where a number
        is none, or there are more than 128."""

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
    substrate: MetalSubstrate,
) -> tuple[mx.array, mx.array]:
    """RMS norm over head_dim and RoPE (halves) of queries and keys, each where it is given, and
    ``append`` of keys and values: (new token, queries ``[len(rows), query_heads, head_dim]``).

    queries: ``[len(rows), query_heads, head_dim]``; keys, values: ``[len(rows), kv_heads,
    head_dim]``; all of one dtype. norms: the weights of queries and of keys, ``[head_dim]``
    float32, and eps. rope: ValueError where it is not of such heads.
    """
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
    """The same on the CPU, computed in float32.

    queries, keys, values: float32 or bfloat16 of any strides, such as parts of one matrix, which
    are not copied; the queries that come out have the dtype of those that go in. angles: of
    ``rope_angles``, ``[len(rows), 2 * pairs]``.
    """

def rope_angles(rows: RowTable, rope: RopeTable, workers: CpuWorkers) -> mx.array:
    """The angles of a table's rows, ``[len(rows), 2 * pairs]`` float32: the cosines of the pairs of
    dimensions, then their sines, both times the magnitude. Computed in double precision."""

class StateMemory:
    """Memory for cells, in which recurrent layers keep the states of a sequence: zeros until they
    are written, at an address that never changes. A read or write behind its end ends the process.
    """

    def __init__(self, bytes: int) -> None:
        """bytes: the least size; it is rounded up to whole pages. OSError where the system has no
        addresses."""
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def release(self, offset: int, bytes: int) -> None:
        """Give memory back to the system: it holds zeros then. ValueError where it is not in whole
        pages. Releases the interpreter lock."""
    def committed(self, offset: int, bytes: int) -> int:
        """Return how many bytes of a part are in memory. Raises as ``release`` does. Releases the
        interpreter lock."""

class StateRows:
    """Which cells the rows of a step begin with and end in. Made once per step and shared by every
    recurrent layer. Keeps the memories alive."""

    def __init__(
        self,
        segments: list[tuple[int, int, list[tuple[int, int]]]],
        memories: list[StateMemory],
    ) -> None:
        """segments: of one sequence each, ``(count, read, [(rows, write), ...])``, row i of the
        flat token array in their order. read: address of the cell that a segment begins with, or 0:
        zeros. After the first ``rows`` rows of it, ascending, its state is written to the cell at
        ``write``; the last one is after all rows, and may be the cell that was read. memories:
        where all cells lie; IndexError for an address that lies in none.
        """
    def __len__(self) -> int: ...

class GatedDelta:
    """The parameters of a gated delta net beside its projections."""

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
        """Value head h reads key head ``h / (value_heads / key_heads)``; both dimensions are
        multiples of 16, 256 at most. All arrays float32. conv: ``[tail_rows + 1, conv_width]``,
        ``conv_width = 2 * key_heads * key_dim + value_heads * value_dim``, the weights of the newest
        row last; a_log, dt_bias: ``[value_heads]``; norm: ``[value_dim]``; eps: of the norm."""

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
    """A gated delta net between its projections: (new token, ``RMSNorm(y) * SiLU(z)``), the second
    of z's shape. Cells are read and written at ``offset`` bytes from their beginning:
    S ``[value_heads][value_dim][key_dim]``, then the newest rows of qkv ``[tail_rows][conv_width]``,
    all float32.

    qkv: ``[len(rows), conv_width]``, queries, keys and values before the convolution; z:
    ``[len(rows), value_heads * value_dim]``; a, b: ``[len(rows), value_heads]``; float32, and parts
    of one matrix are not copied. Per token and value head, with queries and keys as unit vectors
    (queries also times ``key_dim ** -0.5``): ``S = S * exp(-exp(a_log) * softplus(a + dt_bias))``,
    ``S += (v - S k) * sigmoid(b) k^T``, ``y = S q``. Tokens are computed one after the other: how
    they are cut into steps, and what else runs, changes no bit. IndexError where a cell has fewer
    bytes behind the offset.
    """
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
    workers: MetalSubstrate,
) -> tuple[mx.array, mx.array]:
    """The same on a GPU, in two commands. Both dimensions are 128. qkv, z, a and b: float32, float16
    or bfloat16, all alike; so are the rows of qkv in cells, and what comes out."""

class PackedLinear:
    """A linear layer's weights in the order in which the CPU's kernels read them
    (kernels/cpu/linear.h), in memory of its own."""

    def __init__(
        self,
        weights: list[mx.array],
        workers: CpuWorkers,
        codes: list[tuple[mx.array, mx.array | None, int, int] | None],
        exact: bool = False,
    ) -> None:
        """weights: ``[outputs, inputs]`` float32, bfloat16, or float16 (kept as float32); several
        become one layer, with the outputs of one behind those of another. codes: empty, or for each
        weight that is of uint32 words ``(scales, biases, bits, group_size)`` as ``mx.quantize``
        gives them in the modes affine and mxfp4, where biases are None.

        Codes are kept in 4 bits or in 8; of parts that differ as the widest of them need, and as
        float32 where one is plain. exact: x is never rounded. ValueError for what cannot be packed.
        OSError without memory.
        """
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def packed_bytes(inputs: int, matrices: list[tuple[int, mx.Dtype, int, int]]) -> int:
    """Return ``nbytes`` of a PackedLinear. matrices: outputs; the dtype of numbers or scales; bits
    and group size of codes, else 0."""

class PackedExperts:
    """The weights of one linear layer of every expert of a mixture, each as a PackedLinear."""

    def __init__(
        self,
        weights: list[mx.array],
        workers: CpuWorkers,
        codes: list[tuple[mx.array, mx.array | None, int, int] | None],
    ) -> None:
        """As for a PackedLinear, of stacks: weights ``[experts, outputs, inputs]``, scales and
        biases ``[experts, outputs, groups]``."""
    @property
    def nbytes(self) -> int: ...

# Products of packed layers: everything is float32, each sum in the order of the inputs. A row's
# result has the same bits in any company, on any number of threads of one instruction set. How far
# it is from the exact one, the native tests say: 1e-5 of the sum of the products' magnitudes.

def linear(
    x: mx.array,
    packed: PackedLinear,
    workers: CpuWorkers,
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    residual: mx.array | None = None,
) -> mx.array:
    """``x @ W.T`` for rows ``[R, ...]`` of ``inputs`` numbers each: ``[R, outputs]``.

    norm: ``[inputs]``, the weight of an RMS norm (with eps) that the rows take before.
    residual: ``[R, outputs]``, added to the result.
    """

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
    """``linear`` whose outputs are heads: an array ``[R, count, outputs // sum(heads)]`` for each
    count of heads. Raises IndexError where there are more heads than outputs, and ValueError where
    they cannot be of one size."""

def gated_mlp(
    x: mx.array,
    norm: mx.array,
    eps: float,
    gate_up: PackedLinear,
    down: PackedLinear,
    workers: CpuWorkers,
) -> mx.array:
    """``x + down(silu(gate(y)) * up(y))`` with y the RMS norm of x ``[R, hidden]``.

    gate_up: gate and up as one layer, the outputs of gate first.
    """

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
    """``x + sum(weight * down(silu(gate(y)) * up(y)))`` over the experts that the router chooses
    for each row, the best one first, with y the RMS norm of x ``[R, hidden]``.

    router: an output for each expert, of which the softmax of all is taken; then the ``chosen``
    largest, of equal ones the first. normalised: whether these are divided by their sum. shared:
    gate_up and down of an expert of all rows, whose result is multiplied by the sigmoid of one more
    output of the router. IndexError for more experts than there are, ValueError for layers that do
    not fit each other.
    """

def rms_norm(x: mx.array, weight: mx.array, eps: float, workers: CpuWorkers) -> mx.array:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` of rows ``[R, n]``."""

def packed_rows(ids: mx.array, packed: PackedLinear, workers: CpuWorkers) -> mx.array:
    """Rows ``[T, inputs]`` of a layer, unpacked: an embedding of ids ``[T]`` int32.

    The row of an id that is negative, or not below the layer's outputs, is NaN: it is known only
    when it is evaluated, and an error of then would end all that is evaluated together.
    """

def choose_tokens(
    raw: mx.array, adjusted: mx.array, choices: mx.array, workers: CpuWorkers
) -> tuple[mx.array, mx.array]:
    """The tokens of rows over a vocabulary: (ids ``[R]`` int32, finite ``[R]`` bool).

    raw: ``[R, V]`` float32, as the model gave them. finite: whether all of a row are numbers; the
    id of one that is not is 0. adjusted: the same after whatever changes them, -inf included; may
    be ``raw`` itself, which is then read once. choices: ``[R, 5]`` float32:

    temperature  0 takes the first of the largest; otherwise the weights are
                 ``exp((x - max) / temperature)``
    top_k        tokens that stay, and all that weigh as much as the last of them; 0 is off
    top_p        of these, in falling order, as many as reach this share of their sum, and all that
                 weigh as much as the last of them; 1 is off
    min_p        share of the largest weight that a token must have; 0 is off
    draw         in [0, 1): the token at which the sum of what stays, in the order of the ids,
                 passes this share of all of it

    Sums are in double. A row's id depends on the row and the instruction set alone. ValueError for
    other shapes and types.
    """

def gather(
    token: mx.array,
    rows: MetalRows,
    segment: int,
    tokens: int,
    layer: Layer,
    kv_heads: int,
    head_dim: int,
    substrate: MetalSubstrate,
) -> tuple[mx.array, mx.array]:
    """Keys and values of the first ``tokens`` rows of a segment's range, copied out of any kind of
    substrate: ``[tokens, kv_heads, head_dim]`` each, of the layer's dtype."""

def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) * up``, element by element, as one command. Both of one shape and dtype: float32,
    float16 or bfloat16. Computed in float32, rounded once. ValueError for other types, IndexError
    for no or more than 2**31 elements; on a CPU stream a RuntimeError when it is evaluated."""

def step_end(arrays: list[mx.array], rows: MetalRows, substrate: MetalSubstrate) -> mx.array:
    """The end of a step: ``[1]`` uint64, its epoch.

    Its evaluation signals the epoch when the device has done all that the arrays need: the results
    of the step, and the newest cache token of every layer. What else is made of the rows must not
    be evaluated later: that is a RuntimeError. So is a second end, an operation made behind it, and
    an end before that of an older step.
    """
