"""Types of the native extension: memory of the POSIX and Metal substrates, and MLX primitives over
it.

Ownership. Python objects here are handles that may be dropped at any time: primitives, row tables
and queued operations keep alive the objects that they use. Address ranges and heaps release their
memory when nothing refers to them.

Threads. Memory operations may be called from any thread. MLX operations are made and evaluated on
the engine's thread; they run on MLX's stream thread and on the threads of ``CpuWorkers``.
``Mapper`` has a thread of its own.

Errors. IndexError (``std::out_of_range``): a count or index outside its interval. ValueError:
arguments that cannot work together. OSError with errno: a refused system call. These are raised
when the object or operation is made, before any memory is touched. RuntimeError: a bug, such as a
block mapped twice; or, at evaluation, no memory for a result, or a stream of the wrong device: rows
of the POSIX substrate need a CPU stream, rows of a ``MetalSubstrate`` a GPU stream.

Names after the heading "Metal" exist only where ``HAS_METAL`` is true."""

from collections.abc import Sequence
from typing import overload

import mlx.core as mx

HAS_METAL: bool
"""Whether this build has the Metal substrates. ``metal_capabilities`` looks for a device."""

MLX_VERSION: str
SYSTEM_PAGE_BYTES: int
"""The MMU page of this system: 4096 on most Linux machines, 16384 on a Mac."""

def instruction_sets() -> list[str]:
    """The instruction sets that this machine can run, the best one first: "amx", "bf16", "vnni",
    "avx512", "avx2" and "sse2" on x86-64, "dotprod" and "neon" on arm64."""

class Geometry:
    """The shape of one group of regions. A block is the same run of tokens in every region.

    Ranges and heaps are region-major: adjacent blocks of a heap take one mapping per region."""

    def __init__(
        self,
        *,
        page_bytes: int,
        tokens_per_block: int,
        blocks_per_heap: int,
        blocks_per_range: int,
        region_row_bytes: list[int],
    ) -> None:
        """page_bytes: multiple of SYSTEM_PAGE_BYTES. region_row_bytes: bytes of a token, by region;
        ``tokens_per_block`` rows fill whole pages. At most 4096 regions and 2**46 bytes per
        range."""
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
        """Bytes that the system charges for the heap: ``st_blocks`` for a memfd. Any thread."""

class AddressRange:
    """Contiguous addresses of one sequence.

    Reading a block without memory and writing a read-only block end in SIGSEGV."""

    @staticmethod
    def sparse(geometry: Geometry) -> AddressRange:
        """Reserves ``range_bytes`` of addresses; takes blocks of shared heaps."""
    @staticmethod
    def dense(geometry: Geometry) -> AddressRange:
        """Takes one whole dense heap, whose addresses it has."""
    def map(self, heap: Heap, heap_block: int, block: int, count: int, writable: bool) -> None:
        """Maps heap blocks ``[heap_block, + count)`` at range blocks ``[block, + count)``.

        A block of a shared heap may be mapped any number of times. ValueError for read-only dense
        ranges, and for ranges of a ``MetalSubstrate``, which ``Mapper`` maps. OSError(ENOMEM), with
        nothing changed: the system has no mapping left. Releases the interpreter lock."""
    @property
    def mapped_tokens(self) -> int:
        """Tokens of the leading mapped blocks, read-only ones included."""
    @property
    def base_address(self) -> int:
        """Address of region 0 for kernels; 0 for a paged range and a dense one without a heap."""

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

        A writable mapping also commits memory if the system can (Linux 5.14) and has it: later
        writes take no page fault. ``refused`` tells whether the mapping was made. A block already
        mapped, or a heap of another kind, is a ``failure``."""
    def refused(self, ticket: int) -> bool:
        """Whether the system refused a completed ``map`` and changed nothing. True once per ticket;
        False for other operations. RuntimeError: the ticket is not completed."""
    def unmap(self, range: AddressRange, block: int, count: int) -> int:
        """Queues the unmapping of range blocks ``[block, + count)``; returns its ticket."""
    def release(self, heap: Heap, block: int, count: int) -> int:
        """Queues releasing the memory of unmapped heap blocks to the system; returns its ticket."""
    @property
    def completed(self) -> int:
        """The newest ticket with all earlier ones done, too; 0 at first."""
    @property
    def failure(self) -> str:
        """The first failed operation's message, or "". After a failure mappings are in doubt."""
    def wait(self, ticket: int, timeout_s: float) -> bool:
        """Waits without the interpreter lock; False: ``timeout_s`` (0 to 3600) passed first."""

class CopyCounter:
    """Counts the K and V bytes that ``block_copy`` has copied."""

    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...

class CpuWorkers:
    """Threads and instruction set of the CPU kernels, shared by all operations of an engine."""

    def __init__(
        self, threads: int, instruction_set: str = "auto", activations: str = "float32"
    ) -> None:
        """threads: 1 to 256, the caller's included. activations: float32, bfloat16 or int8, to
        which products of packed weights may round x if the instruction set supports it."""
    @property
    def threads(self) -> int: ...
    @property
    def instruction_set(self) -> str: ...

class RowTable:
    """The places of the rows of a step's flat token array.

    segments: ``(range, start, count)``: the next ``count`` rows are the range's positions from
    ``start`` on. All blocks from 0 to ``start + count`` must be mapped, which is checked here and
    not in kernels. Rows in read-only blocks cannot be appended. At most 2**24 rows, at positions
    below 2**31.

    A table keeps addresses alive, not mappings: before unmapping a block below ``start + count``,
    wait for the step's epoch, so that everything made of the table has been evaluated. Otherwise
    kernels end in SIGSEGV; no check can prevent that, because ``Mapper`` has its own thread."""

    def __init__(self, segments: list[tuple[AddressRange, int, int]]) -> None: ...
    def __len__(self) -> int: ...

class Layer:
    """The regions of one layer and their dtype: bfloat16, float32, or on Metal float16."""

    def __init__(self, key_region: int, value_region: int, dtype: mx.Dtype) -> None: ...

# Below, `token` is the layer's ordering handle, an array of one element: append() returns the next
# one, and operations that read the layer take the newest one, so that reads wait for writes. Sums
# are in float32, in an order that depends on a row's position alone: a row's result has the same
# bits in any batch, in decode and chunk calls, on any number of threads of one instruction set.

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
    """Writes row i of keys and values at the place of row i; returns the next ordering handle.

    keys, values: ``[len(rows), kv_heads, head_dim]`` float32 or bfloat16 (on Metal also float16),
    any strides; rounded to nearest even. IndexError: a row lies in a read-only block."""

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
    """Softmax attention of R rows, each over positions 0 up to its own. Same shape and dtype.

    queries: ``[R, query_heads, head_dim]`` float32 or bfloat16 (on Metal also float16) for rows
    ``[first_row, + R)``. ``query_heads`` is a multiple of ``kv_heads``; head_dim is 32 (not on
    Metal), 64, 128 or 256. Fast for one row per sequence, correct for any."""

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
    """``decode_attention`` for one segment's rows ``[count, query_heads, head_dim]``; fast for
    many."""

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

    The view keeps addresses alive, not mappings: do not read it after the rows are unmapped.
    substrate: for a range of Metal; ValueError if paged (see ``gather``). RuntimeError for a sparse
    range whose newest step has one row of it and has not completed: ``gather`` waits for that."""

def block_copy(
    token: mx.array,
    source: AddressRange,
    source_block: int,
    target: AddressRange,
    target_block: int,
    tokens: int,
    counter: CopyCounter,
) -> mx.array:
    """Copies the first ``tokens`` rows of a block, in all regions, to a writable block; adds the
    bytes to the counter when it has run. Returns the next ordering handle."""

# --- Metal: where HAS_METAL is true ----------------------------------------------------------------

def metal_capabilities() -> dict[str, bool | int | str | list[str]]:
    """Return the properties of the default device; {}: there is no device."""

class MetalSubstrate:
    """Heaps and ranges of one kind and geometry on the default Metal device.

    Only a ``Mapper`` maps and unmaps them, so that no call waits for the device. For the engine's
    thread; the work of ``copy_block`` runs on the mapper's."""

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
        """kind: "sparse", "paged" or "dense". max_ranges: the limit of ranges. timeout_s: the
        device's time for any one operation (0 to 3600), after which the substrate has failed for
        good. max_buffer_bytes: the limit of one buffer, of which a sparse range may need several;
        0: the device's own. residency_keep_s: how long a thread keeps memory resident after its
        last use (0 to 86400). maps_beside_steps: whether mappings of a sparse substrate may change
        while steps are in flight. If not, operations of ``Mapper`` fail meanwhile, mappings take
        effect with ``finish_mappings``, and ``rows`` before that is a RuntimeError. RuntimeError
        also names everything that the device lacks."""
    def hold(self, arrays: list[mx.array]) -> None:
        """Keeps evaluated arrays, the weights, resident as well. Once, before the first step.
        ValueError: an array is not evaluated. OSError(ENOMEM): the device refuses."""
    def new_heap(self) -> Heap:
        """OSError(ENOMEM): the device refuses. Releases the interpreter lock."""
    def new_range(self) -> AddressRange:
        """As ``new_heap``."""
    def finish_mappings(self, mapper: Mapper) -> int:
        """Queues the wait for all maps that were queued before; returns its ticket."""
    def commit_heap(self, mapper: Mapper, heap: Heap) -> int:
        """Queues allocating the memory of a released heap again; returns the ticket, which is
        ``refused`` if the device refuses."""
    def rows(self, segments: list[tuple[AddressRange, int, int]]) -> MetalRows:
        """The rows of the next step, as in ``RowTable``. Opens its epoch; ``step_end`` or
        ``abandon`` must close epochs in order. RuntimeError: a row would be written in a shared
        block."""
    def make_cells(self, count: int, cell_bytes: int) -> None:
        """Makes ``count`` cells at fixed addresses, as long as the substrate lives. Once, before
        the first step. RuntimeError: a second call, or cells of a dense substrate that no one
        buffer can hold. OSError(ENOMEM): the device refuses."""
    def state_rows(
        self,
        rows: MetalRows,
        segments: list[tuple[int, int | None, list[tuple[int, int]]]],
    ) -> MetalStateRows:
        """The cells of a step: (count, cell that is read, writes) of every sequence in the order of
        the rows; None reads zeros. writes: ``(rows, cell)``, rising: the cell gets the state after
        ``rows`` rows; the last is after all rows, and may be the cell that was read. RuntimeError:
        a cell is read before any write, is written twice, or may still be used by another
        sequence's step."""
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
        block; returns its ticket. The steps that wrote the rows must have completed."""
    def abandon(self, rows: MetalRows) -> None:
        """Note that the step failed and no longer runs: its epoch counts as complete."""
    @property
    def completed_epoch(self) -> int:
        """The newest epoch up to which all steps have completed; 0 at first."""
    @property
    def buffers_per_range(self) -> int: ...
    @property
    def failure(self) -> str:
        """The command that the device did not finish in time, or "". After that nothing is
        valid."""
    def shutdown(self) -> bool:
        """Waits for all steps, unmaps and releases everything. False: the device did not answer in
        time, and the process must end without releasing anything. Releases the interpreter lock."""

class MetalRows:
    """The places of the rows of one step's flat token array, and the step's epoch."""

    def __len__(self) -> int: ...
    @property
    def epoch(self) -> int: ...

class MetalStateRows:
    """The cells that the rows of one step read and write."""

class RopeTable:
    """The rotation of heads (RoPE), for all positions."""

    def __init__(self, frequencies: Sequence[float], magnitude: float = 1.0) -> None:
        """frequencies: ``[pairs]``, at most 128: dimensions i and ``i + pairs`` of a head rotate
        together by ``position * frequencies[i]`` radians; dimensions from ``2 * pairs`` on do not.
        magnitude: factor of the rotated dimensions. ValueError: too many, or not finite."""

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
    """RMS norm over head_dim and RoPE of queries and keys, unless None, and ``append``: (next
    ordering handle, queries ``[len(rows), query_heads, head_dim]``).

    queries: ``[len(rows), query_heads, head_dim]``; keys, values: ``[len(rows), kv_heads,
    head_dim]``; all of one dtype. norms: the weights of queries and of keys, ``[head_dim]``
    float32, and eps. ValueError: rope has more dimensions than a head."""
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
    are not copied; the returned queries keep the dtype. angles: from ``rope_angles``."""

def rope_angles(rows: RowTable, rope: RopeTable, workers: CpuWorkers) -> mx.array:
    """The angles of the rows, ``[len(rows), 2 * pairs]`` float32: cosines of all pairs, then sines,
    both times the magnitude. Computed in double precision."""

class StateMemory:
    """Memory for cells, the states of recurrent layers: zeros until written, at a fixed address. A
    read or write after the end ends the process."""

    def __init__(self, bytes: int) -> None:
        """bytes: rounded up to whole pages. OSError: the system has no addresses."""
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def release(self, offset: int, bytes: int) -> None:
        """Release whole pages to the system, which then hold zeros. ValueError: not whole pages."""
    def committed(self, offset: int, bytes: int) -> int:
        """Return how many bytes of a part are in memory. ValueError: not whole pages."""

class StateRows:
    """The cells that a step's rows read and write; one object for all recurrent layers."""

    def __init__(
        self,
        segments: list[tuple[int, int, list[tuple[int, int]]]],
        memories: list[StateMemory],
    ) -> None:
        """segments: ``(count, read, [(rows, write), ...])``, one per sequence in the order of the
        rows. read: address of the cell with the state before the rows; 0: zeros. After the first
        ``rows`` rows, ascending, the state is written to the cell at ``write``; the last is after
        all rows, and may be the cell that was read. IndexError: a cell lies in none of the
        memories."""
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
        """Value head h reads key head ``h / (value_heads / key_heads)``. Both dimensions are
        multiples of 16, at most 256. All arrays are float32. conv: ``[tail_rows + 1, conv_width]``,
        the newest row's weights last, ``conv_width = 2 * key_heads * key_dim + value_heads *
        value_dim``. a_log, dt_bias: ``[value_heads]``. norm: ``[value_dim]``. eps: of the norm."""

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
    """A gated delta net between its projections: (next ordering handle, ``RMSNorm(y) * SiLU(z)`` in
    z's shape). At ``offset`` bytes from its beginning a cell holds S
    ``[value_heads][value_dim][key_dim]``, then the newest rows of qkv ``[tail_rows][conv_width]``,
    all float32.

    qkv: ``[len(rows), conv_width]``, queries, keys and values before the convolution; z:
    ``[len(rows), value_heads * value_dim]``; a, b: ``[len(rows), value_heads]``; float32, and parts
    of one matrix are not copied. Per token and value head, with queries and keys as unit vectors
    (queries also times ``key_dim ** -0.5``): ``S = S * exp(-exp(a_log) * softplus(a + dt_bias))``,
    ``S += (v - S k) * sigmoid(b) k^T``, ``y = S q``. Results do not depend on the division of
    tokens into steps, nor on other sequences. IndexError: a cell has too few bytes after the
    offset."""
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
    """The same on a GPU. Both dimensions are 128. qkv, z, a, b, the result and the rows of qkv in
    cells have one dtype: float32, float16 or bfloat16."""

class PackedLinear:
    """A linear layer's weights, copied in the order of the CPU kernels (kernels/cpu/linear.h)."""

    def __init__(
        self,
        weights: list[mx.array],
        workers: CpuWorkers,
        codes: list[tuple[mx.array, mx.array | None, int, int] | None],
        exact: bool = False,
    ) -> None:
        """weights: ``[outputs, inputs]`` float32, bfloat16, or float16 (kept as float32); several
        become one layer, their outputs one after the other. codes: empty, or for each weight of
        uint32 words ``(scales, biases, bits, group_size)`` from ``mx.quantize`` in the modes affine
        and mxfp4, the latter without biases.

        Codes are kept in 4 or 8 bits. Parts of several kinds are all kept as the widest needs; as float32 if
        one is not quantized. exact: x is never rounded. ValueError: weights that cannot be packed.
        OSError: no memory."""
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def packed_bytes(inputs: int, matrices: list[tuple[int, mx.Dtype, int, int]]) -> int:
    """Return ``nbytes`` of a PackedLinear. matrices: outputs; dtype of numbers or scales; bits and
    group size of codes, else 0."""

class PackedExperts:
    """The weights of one linear layer of all experts of a mixture, each as a PackedLinear."""

    def __init__(
        self,
        weights: list[mx.array],
        workers: CpuWorkers,
        codes: list[tuple[mx.array, mx.array | None, int, int] | None],
    ) -> None:
        """As for a PackedLinear, stacked: weights ``[experts, outputs, inputs]``, scales and biases
        ``[experts, outputs, groups]``."""
    @property
    def nbytes(self) -> int: ...

# Products of packed layers are float32, each sum in the order of the inputs. A row's result has the
# same bits in any batch, on any number of threads of one instruction set. The error is at most 1e-5
# of the sum of the products' magnitudes (native tests).

def linear(
    x: mx.array,
    packed: PackedLinear,
    workers: CpuWorkers,
    *,
    norm: mx.array | None = None,
    eps: float = 0.0,
    residual: mx.array | None = None,
) -> mx.array:
    """``x @ W.T`` for rows ``[R, ...]`` of ``inputs`` numbers: ``[R, outputs]``. norm:
    ``[inputs]``, weight of an RMS norm applied to x. residual: ``[R, outputs]``, added to the
    result."""

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
    """``linear`` with its outputs split into heads: ``[R, count, outputs // sum(heads)]`` for each
    count. IndexError: more heads than outputs. ValueError: heads of unequal size."""

def gated_mlp(
    x: mx.array,
    norm: mx.array,
    eps: float,
    gate_up: PackedLinear,
    down: PackedLinear,
    workers: CpuWorkers,
) -> mx.array:
    """``x + down(silu(gate(y)) * up(y))`` with y the RMS norm of x ``[R, hidden]``. gate_up: one
    layer, the outputs of gate first."""

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

    router: one output per expert. Of the softmax of all, the ``chosen`` largest are the weights;
    among equals the first. normalised: weights are divided by their sum. shared: gate_up and down
    of an expert for all rows; its result is multiplied by the sigmoid of one more output of the
    router. IndexError: ``chosen`` exceeds the experts. ValueError: layers do not fit each other."""

def rms_norm(x: mx.array, weight: mx.array, eps: float, workers: CpuWorkers) -> mx.array:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` of rows ``[R, n]``."""

def packed_rows(ids: mx.array, packed: PackedLinear, workers: CpuWorkers) -> mx.array:
    """Rows ``[T, inputs]`` of a layer, unpacked: an embedding of ids ``[T]`` int32.

    A row is NaN if its id is negative or not below the layer's outputs: ids are known only at
    evaluation, and an error there would end everything that is evaluated together."""

def choose_tokens(
    raw: mx.array, adjusted: mx.array, choices: mx.array, workers: CpuWorkers
) -> tuple[mx.array, mx.array]:
    """The tokens of rows over a vocabulary: (ids ``[R]`` int32, finite ``[R]`` bool).

    raw: ``[R, V]`` float32 logits of the model. finite: whether all logits of a row are; else the
    id is 0. adjusted: the logits after all changes, may contain -inf; if it is ``raw`` itself, it
    is read once. choices: ``[R, 5]`` float32:

    temperature  0 takes the first of the largest; otherwise the weights are
                 ``exp((x - max) / temperature)``
    top_k        the number of heaviest tokens to keep, with all as heavy as the last; 0: off
    top_p        of these, the heaviest are kept until they reach this share of their sum, with
                 all as heavy as the last; 1: off
    min_p        share of the largest weight that a token must have; 0: off
    draw         in [0, 1): chooses the token at which the sum of the kept weights, in the order
                 of the ids, passes this share of the total

    Sums are in double. A row's id depends on the row and the instruction set alone. ValueError:
    other shapes and types."""

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
    """Keys and values of the first ``tokens`` rows of a segment's range, copied from any kind of
    substrate: ``[tokens, kv_heads, head_dim]`` each, of the layer's dtype."""

def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) * up``, element by element, as one command. Both have one shape and dtype:
    float32, float16 or bfloat16. Computed in float32, rounded once. ValueError: other types.
    IndexError: no elements, or more than 2**31. RuntimeError at evaluation: a CPU stream."""

def step_end(arrays: list[mx.array], rows: MetalRows, substrate: MetalSubstrate) -> mx.array:
    """The end of a step: ``[1]`` uint64, its epoch. Its evaluation signals the epoch when the
    device has computed the arrays: the results and the newest ordering handle of every layer.

    RuntimeError: evaluating anything else of these rows later, a second end, an operation made
    after the end, or an end before that of an older step."""
