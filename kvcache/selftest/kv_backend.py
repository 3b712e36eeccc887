"""The self-test of mappings: map, write, read, share, copy, unmap and release blocks of a small
cache, then make a cache of the real size."""

import time
from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcache.backends.backend import MAPPING_LIMIT_S, PageBackend, Segment, StepRows
from kvcache.backends.choice import KVBackend
from kvcache.layout import METAL_PAGES, Group, KVLayout, KVShape, KVSpec, dense_layout, paged_layout
from kvcache.selftest.machine import process_footprint
from kvcache.selftest.reference import attention, sample_rows
from kvcache.selftest.run import Result
from kvcache.views import layer_regions
from metal_ext import Softmax

QUERIES_PER_HEAD = 3
SHAPE = KVShape.uniform(2, KVSpec(kv_heads=2, head_dim=64))
# With this scale nearly all weight is on the row equal to the query.
SOFTMAX = Softmax(0.5)
MAX_TOKENS = 16384  # 16 MiB of K and V
# The number of rows that are written after the first block.
TAIL_ROWS = 64
# The allowed error of values between -1 and 1 that are stored with 8 bits.
TOLERANCE = 0.02
# The process must shrink by this share of a released heap. Other allocations may take the rest.
RETURNED_SHARE = 0.9
# The test fails if the system makes fewer buffers of the real size than this.
NEEDED_BUFFERS = 3
# The most rows written in a block of the real size. A step's memory grows with its rows.
MAX_ROWS = 32

Check = Callable[[], Result]
NamedCheck = tuple[str, Check]


class NotAsPromisedError(Exception):
    """The backend does not do what PageBackend specifies."""


def run_checks(checks: Iterable[NamedCheck], begin: Callable[[str], None]) -> list[Result]:
    """Run checks until one fails. ``begin`` is called with each check's name before the check."""
    results: list[Result] = []
    for name, check in checks:
        begin(name)
        started = time.monotonic()
        try:
            result, passed = check(), True
        except Exception as error:
            result, passed = Result(f"{type(error).__name__}: {error}"), False
        seconds = time.monotonic() - started
        results.append(Result(result.text, result.figures, name, passed, seconds))
        if not passed:
            break
    return results


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotAsPromisedError(otherwise)


def small_layout(
    kv_backend: KVBackend,
    shape: KVShape,
    *,
    max_tokens: int,
    system_page_bytes: int,
    page_bytes: int | None = None,
    heap_bytes: int | None = None,
) -> KVLayout:
    """Return a layout for ``max_tokens``. Without ``page_bytes``, pages have the GPU's preferred or
    the system's size. Without ``heap_bytes``, one heap holds all tokens."""
    if kv_backend.is_dense:
        smallest = min(METAL_PAGES) if kv_backend.on_gpu else system_page_bytes
        return dense_layout(shape, max_tokens=max_tokens, system_page_bytes=smallest)
    usual = (
        METAL_PAGES[0] if kv_backend.on_gpu else max(system_page_bytes, shape.layers[0].row_bytes)
    )
    return paged_layout(
        shape,
        max_tokens=max_tokens,
        heap_bytes=heap_bytes or max_tokens * shape.bytes_per_token,
        system_page_bytes=system_page_bytes,
        page_bytes=page_bytes or usual,
        device_pages=METAL_PAGES if kv_backend.on_gpu else None,
    )


# --- operations of a backend that must succeed ----------------------------------------------------


def add(backend: PageBackend, *, heaps: int, buffers: int) -> None:
    added = all(backend.add_heap() for _ in range(heaps))
    added = added and all(backend.add_buffer() for _ in range(buffers))
    require(added, "the system refuses a heap or a buffer")


def map_blocks(
    backend: PageBackend,
    buffer: int,
    block: int,
    heap_block: int,
    count: int = 1,
    *,
    heap: int = 0,
    writable: bool = True,
) -> None:
    mapped = backend.map(buffer, block, heap, heap_block, count, writable=writable)
    require(mapped, "the system refuses a mapping")


def unmap_blocks(backend: PageBackend, buffer: int, count: int) -> Result:
    finish(backend, backend.unmap(buffer, 0, count))
    return Result(f"{count} blocks")


def release_heap(backend: PageBackend, group: Group) -> Result:
    """Map, unmap and release heap 0. Require that the process's memory then shrinks."""
    blocks, heap_bytes = group.blocks_per_heap, group.heap_bytes
    if backend.maps_while_running:
        ticket = backend.map_ahead(0, 0, 0, 0, blocks)
        finish(backend, ticket)
        require(not backend.refused(ticket), "the system refuses a mapping")
    else:
        require(backend.commit_heap(0), "the system refuses the memory of a heap")
        map_blocks(backend, 0, 0, 0, blocks)
        backend.finish_mappings()
    mapped = process_footprint()
    unmap_blocks(backend, 0, blocks)
    finish(backend, backend.release(0, 0, blocks))
    returned = mapped - process_footprint()
    text = f"of {heap_bytes} bytes {returned} came back"
    require(returned >= RETURNED_SHARE * heap_bytes, text)
    charged = backend.committed_bytes()
    return Result(text, {"heap": heap_bytes, "returned": returned, "charged_after": charged})


def finish(backend: PageBackend, ticket: int) -> None:
    require(backend.wait(ticket, MAPPING_LIMIT_S), f"it took over {MAPPING_LIMIT_S:.0f} s")
    backend.completed_ticket()  # raises an error if the operation failed


def shut_down(backend: PageBackend) -> Result:
    require(backend.shut_down(), "the device did not answer")
    return Result("in order")


# --- checks of mappings ---------------------------------------------------------------------------


class KVBackendChecks:
    """Checks two buffers that map blocks of one heap. All values are exact in bfloat16."""

    def __init__(
        self, backend: PageBackend, layout: KVLayout, num_tokens: int | None = None
    ) -> None:
        """``num_tokens`` limits the tokens per buffer; None is as many as these checks need."""
        self._backend = backend
        (self._group,) = layout.groups
        self.layers = layer_regions(layout)
        self.tokens = [mx.zeros((1,)) for _ in self.layers]
        # The number of tokens in the first block, or 64 if one block holds a whole context.
        self._edge = self._group.tokens_per_block if backend.shares_blocks else 64
        self._footprint = 0
        (spec,) = layout.shape.specs
        self._query_heads = np.arange(QUERIES_PER_HEAD * spec.kv_heads)[None]
        rows = num_tokens or self._edge + TAIL_ROWS
        size = (2 * len(self.layers), rows, spec.kv_heads, spec.head_dim)
        self.written = np.random.default_rng(7).integers(-63, 64, size).astype(np.float32) / 64
        """What the cache should hold: the keys and then the values of each layer."""

    def checks(self) -> list[NamedCheck]:
        shares = self._backend.shares_blocks
        share: list[NamedCheck] = [("share", self._share), ("copy", self._copy)]
        read: list[NamedCheck] = [("read the other", lambda: self.read(1, self._edge + 5))]
        release: list[NamedCheck] = [("release", self._release)]
        return [
            ("make", self._make),
            ("map", self._map),
            ("write", self._write),
            ("read", lambda: self.read(0, self._edge + 4)),
            *(share if shares else []),
            ("unmap", lambda: unmap_blocks(self._backend, 0, 2 if shares else 1)),
            *(read if shares else []),
            ("map again", self._map_again),
            ("unmap all", self._unmap_all),
            *([] if self._backend.releases.keeps_heaps else release),
            ("end", lambda: shut_down(self._backend)),
        ]

    def _make(self) -> Result:
        self._footprint = process_footprint()
        add(self._backend, heaps=1, buffers=2)
        return Result(f"a heap of {self._group.heap_bytes} bytes, two buffers")

    def _map(self) -> Result:
        blocks = 2 if self._backend.shares_blocks else 1
        for block in range(blocks):
            map_blocks(self._backend, 0, block, block)
        self._backend.finish_mappings()
        taken = process_footprint() - self._footprint
        zeros = self._check_fresh(0, blocks * self._group.tokens_per_block)
        figures: dict[str, int | float] = {"footprint_growth": taken}
        return Result(f"the process grew by {taken} bytes; {zeros}", figures)

    def _write(self) -> Result:
        """Write a chunk of rows, a chunk that crosses the end of a block, and a single row."""
        steps = ((0, self._edge - 1), (self._edge - 1, 4), (self._edge + 3, 1))
        worst = max(self.compute(0, start, count) for start, count in steps)
        return Result(f"attention differs by {worst:.1e}", {"greatest_difference": worst})

    def _share(self) -> Result:
        map_blocks(self._backend, 1, 0, 0, writable=False)
        map_blocks(self._backend, 1, 1, 2)
        self._backend.finish_mappings()
        return self.read(1, self._edge, last=self._edge + 1)

    def _copy(self) -> Result:
        self._backend.copy_block(0, 1, 1, 1, tokens=4)
        self.read(1, self._edge + 4)
        worst = self.compute(1, self._edge + 4, 1)
        copied = self._backend.copied_bytes
        text = f"{copied} bytes; attention over both differs by {worst:.1e}"
        return Result(text, {"copied_bytes": copied, "greatest_difference": worst})

    def _map_again(self) -> Result:
        map_blocks(self._backend, 0, 0, 1 if self._backend.shares_blocks else 0)
        self._backend.finish_mappings()
        zeros = self._check_fresh(0, self._group.tokens_per_block)
        self.compute(0, 0, 3)
        return Result(f"{zeros}; {self.read(0, 3).text}")

    def _unmap_all(self) -> Result:
        if self._backend.shares_blocks:
            unmap_blocks(self._backend, 1, 2)
        return unmap_blocks(self._backend, 0, 1)

    def _release(self) -> Result:
        return release_heap(self._backend, self._group)

    # --- running steps and comparing contents -----------------------------------------------------

    def compute(self, buffer: int, start: int, count: int) -> float:
        """Run a step over new rows of a buffer. Return the greatest error of attention."""
        rows = self._backend.rows([Segment(buffer, start, count)])
        attended, wanted, samples = [], [], sample_rows(count)
        for number, layer in enumerate(self.layers):
            token, turned = self.append(rows, number, start, count)
            if count == 1:
                attended.append(rows.decode_attention(token, layer, turned, SOFTMAX))
            else:
                attended.append(rows.chunk_attention(token, layer, turned, 0, SOFTMAX))
            past = self.rows_of(number, 0, start + count)
            queries = self.queries(number, start, count)[samples]
            wanted.append(attention(queries, *past, start + samples, SOFTMAX.scale))
        mx.eval(rows.end(attended + self.tokens))
        worst = max(
            float(np.abs(np.array(got.astype(mx.float32))[samples] - want).max())
            for got, want in zip(attended, wanted, strict=True)
        )
        require(worst <= TOLERANCE, f"attention differs by {worst:.1e}")
        return worst

    def append(
        self, rows: StepRows, number: int, start: int, count: int
    ) -> tuple[mx.array, mx.array]:
        """Append new rows of a layer in a step. Return the layer's token and its queries."""
        layer = self.layers[number]
        queries = mx.array(self.queries(number, start, count)).astype(layer.dtype)
        keys, values = map(mx.array, self.rows_of(number, start, count))
        self.tokens[number], turned = rows.append(
            self.tokens[number], layer, queries, keys, values, None
        )
        return self.tokens[number], turned

    def rows_of(
        self, layer: int, start: int, count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        keys, values = self.written[2 * layer : 2 * layer + 2, start : start + count]
        return keys, values

    def queries(self, layer: int, start: int, count: int) -> NDArray[np.float32]:
        """Return ``[count, query_heads, head_dim]``. Each query equals the key of a position that
        it may attend to."""
        positions = start + np.arange(count)[:, None]
        sought = (positions * 7919 + self._query_heads * 104729) % (positions + 1)
        keys = self.written[2 * layer]
        queries: NDArray[np.float32] = keys[sought, self._query_heads // QUERIES_PER_HEAD]
        return queries

    def read(self, buffer: int, tokens: int, last: int | None = None) -> Result:
        """Compare a buffer's first ``tokens`` tokens with the written rows. If they end in a
        read-only block, pass a larger number ``last`` that ends in a writable one."""
        for number, region in enumerate(self._regions(buffer, last or tokens)):
            wrong = (region[:tokens] != self.written[number][:tokens]).any(axis=(1, 2))
            require(not wrong.any(), f"{wrong.sum()} rows of region {number} are wrong")
        return Result(f"{tokens} rows of every region are right")

    def _check_fresh(self, buffer: int, tokens: int) -> str:
        """Check that newly mapped writable blocks hold zeros, if the backend guarantees that."""
        if not self._backend.zeroes_blocks:
            return "what it holds is not promised"
        for number, region in enumerate(self._regions(buffer, tokens)):
            require(not region.any(), f"region {number} of a fresh block is not zero")
        return "it holds zeros"

    def _regions(self, buffer: int, tokens: int) -> list[NDArray[np.float32]]:
        """Return the K and V of every layer. The last token must be in a writable block, because it
        is a row of the step that reads."""
        rows = self._backend.rows([Segment(buffer, tokens - 1, 1)])
        regions = [
            # astype copies to MLX's memory: the host cannot read memory that only a GPU has.
            rows.region(token, layer, kind, 0).astype(mx.float32)
            for layer, token in zip(self.layers, self.tokens, strict=True)
            for kind in ("keys", "values")
        ]
        mx.eval(rows.end([*regions, *self.tokens]))
        return [np.array(region) for region in regions]


class RealSizeChecks(KVBackendChecks):
    """Checks a cache of the size that serving uses, with three of its buffers."""

    def __init__(self, backend: PageBackend, layout: KVLayout, buffers: int) -> None:
        super().__init__(backend, layout)
        self._buffers = buffers

    def checks(self) -> list[NamedCheck]:
        return [
            ("real buffers", self._make),
            ("last block", self._reach_last_block),
            ("real end", lambda: shut_down(self._backend)),
        ]

    def _make(self) -> Result:
        heaps = [self._backend.add_heap() for _ in range(1 + -(-2 // self._group.blocks_per_heap))]
        count = 0
        while all(heaps) and count < self._buffers and self._backend.add_buffer():
            count += 1
        size = self._group.max_tokens * self._group.bytes_per_token
        require(count >= NEEDED_BUFFERS, f"only {count} buffers can be made")
        text = f"{count} of {self._buffers} buffers of {size} bytes of addresses"
        return Result(text, {"buffers": count, "buffer_bytes": size})

    def _reach_last_block(self) -> Result:
        """Copy a block of buffer 0 to the last block of buffer 1, and from there to buffer 2. The
        other blocks of buffer 1 map the first heap's blocks again, which needs no memory."""
        backend, last = self._backend, self._group.blocks_per_buffer - 1
        shared = min(self._group.blocks_per_heap, self._group.blocks_per_buffer)
        rows = min(self._group.tokens_per_block, MAX_ROWS)
        map_blocks(backend, 0, 0, 0, shared)
        backend.finish_mappings()
        worst = self.compute(0, 0, rows)
        for block in range(0, last, shared):
            map_blocks(backend, 1, block, 0, min(shared, last - block), writable=False)
        for number, (buffer, block) in enumerate([(1, last), (2, 0)]):
            heap, heap_block = divmod(number, self._group.blocks_per_heap)
            map_blocks(backend, buffer, block, heap_block, heap=1 + heap)
        backend.finish_mappings()
        backend.copy_block(0, 0, 1, last, tokens=rows)
        backend.copy_block(1, last, 2, 0, tokens=rows)
        result = self.read(2, rows)
        for buffer, count in ((0, shared), (1, last + 1), (2, 1)):
            unmap_blocks(backend, buffer, count)
        return Result(f"block {last}: {result.text}", {"block": last, "greatest_difference": worst})
