"""A sequence's life on a small cache of a real substrate: mapped, written, read, shared, copied,
unmapped, mapped again, and ended in order."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from kvcache.backend import MAPPING_LIMIT_S, PageBackend, Releases, Segment
from kvcache.canary.footprint import process_footprint
from kvcache.canary.reference import attention, some_of
from kvcache.canary.report import Step
from kvcache.layout import (
    METAL_PAGES,
    KVLayout,
    KVShape,
    KVSpec,
    dense_layout,
    paged_layout,
)
from kvcache.substrates import Substrate
from kvcache.views import layer_regions

QUERIES_PER_HEAD = 3


class Pattern:
    """Rows of numbers that bfloat16 keeps exactly, and queries that look for single ones."""

    def __init__(self, tokens: int, shape: KVShape) -> None:
        random = np.random.default_rng(7)
        (spec,) = shape.specs
        self._kv_heads = spec.kv_heads
        size = (2 * len(shape.layers), tokens, spec.kv_heads, spec.head_dim)
        self.regions = (random.integers(-63, 64, size) / 64).astype(np.float32)

    def queries(self, layer: int, start: int, count: int) -> NDArray[np.float32]:
        """``[count, query_heads, head_dim]``: each is the key of a position up to its own."""
        positions = start + np.arange(count)[:, None]
        heads = np.arange(QUERIES_PER_HEAD * self._kv_heads)[None]
        sought = (positions * 7919 + heads * 104729) % (positions + 1)
        found: NDArray[np.float32] = self.regions[2 * layer][sought, heads // QUERIES_PER_HEAD]
        return found


SHAPE = KVShape.uniform(2, KVSpec(kv_heads=2, head_dim=64))
# Sharp: each query sees little more than the one row that it was made for.
SCALE = 0.5
MAX_TOKENS = 16384  # 16 MiB
# Rows that are written beyond the first block.
PATTERN_TAIL = 64
# Of values between -1 and 1 that are kept with eight bits.
TOLERANCE = 0.02
# Of a heap that was released; the process takes and gives back other memory meanwhile.
RETURNED_SHARE = 0.9


class NotAsPromisedError(Exception):
    """What was seen is not what the substrate promises."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What an action saw."""

    said: str
    figures: dict[str, int | float] = field(default_factory=dict)


Action = Callable[[], Finding]


def attempt(actions: Iterable[tuple[str, Action]], begins: Callable[[str], None]) -> list[Step]:
    """Runs actions in order, up to the first one that fails. begins: told each one's name first."""
    steps: list[Step] = []
    for name, action in actions:
        begins(name)
        started = time.monotonic()
        try:
            found, passed = action(), True
        except Exception as error:
            found, passed = Finding(f"{type(error).__name__}: {error}"), False
        seconds = time.monotonic() - started
        steps.append(Step(name, passed, found.said, seconds, found.figures))
        if not passed:
            break
    return steps


def small_layout(
    substrate: Substrate,
    shape: KVShape,
    *,
    max_tokens: int,
    system_page_bytes: int,
    page_bytes: int | None = None,
    heap_bytes: int | None = None,
) -> KVLayout:
    """Heaps and buffers for so many tokens. page_bytes: None for the GPU's preferred page, or the
    system's. heap_bytes: None for heaps that hold all of them."""
    if substrate.is_dense:
        smallest = min(METAL_PAGES) if substrate.on_gpu else system_page_bytes
        return dense_layout(shape, max_tokens=max_tokens, system_page_bytes=smallest)
    usual = (
        METAL_PAGES[0] if substrate.on_gpu else max(system_page_bytes, shape.layers[0].row_bytes)
    )
    return paged_layout(
        shape,
        max_tokens=max_tokens,
        heap_bytes=heap_bytes or max_tokens * shape.bytes_per_token,
        system_page_bytes=system_page_bytes,
        page_bytes=page_bytes or usual,
        device_pages=METAL_PAGES if substrate.on_gpu else None,
    )


class SubstrateTrial:
    """Two buffers over one heap."""

    def __init__(
        self, backend: PageBackend, layout: KVLayout, pattern_tokens: int | None = None
    ) -> None:
        """pattern_tokens: how many there may be in a buffer; None for those of its own actions."""
        self._backend = backend
        (self._group,) = layout.groups
        self.layers = layer_regions(layout)
        self.tokens = [mx.zeros((1,)) for _ in self.layers]
        # Tokens of the first block; where a block is a whole context, as if it were small.
        self._edge = self._group.tokens_per_block if backend.shares_blocks else 64
        self._before = 0
        self._written = Pattern(pattern_tokens or self._edge + PATTERN_TAIL, layout.shape)

    def actions(self) -> list[tuple[str, Action]]:
        """All that is tried, in order."""
        shared: list[tuple[str, Action]] = [("share", self._share), ("copy", self._copy)]
        kept: list[tuple[str, Action]] = [("read the other", self._read_other)]
        shares = self._backend.shares_blocks
        releases = self._backend.releases is not Releases.NOTHING
        return [
            ("make", self._make),
            ("map", self._map),
            ("write", self._write),
            ("read", self._read_back),
            *(shared if shares else []),
            ("unmap", self._unmap),
            *(kept if shares else []),
            ("map again", self._map_again),
            ("unmap all", self._unmap_all),
            *([("release", self._release)] if releases else []),
            ("end", self._end),
        ]

    # --- the actions, in order ------------------------------------------------------------------

    def _make(self) -> Finding:
        self._before = process_footprint()
        made = self._backend.add_heap() and self._backend.add_buffer()
        require(made and self._backend.add_buffer(), "the system refuses a heap or a buffer")
        return Finding(f"a heap of {self._group.heap_bytes} bytes, two buffers")

    def _map(self) -> Finding:
        self._map_writable(0, 0, 0)
        if self._backend.shares_blocks:
            self._map_writable(0, 1, 1)
        self._backend.finish_mappings()
        taken = process_footprint() - self._before
        blocks = 2 if self._backend.shares_blocks else 1
        zeros = self._fresh(0, blocks * self._group.tokens_per_block)
        figures: dict[str, int | float] = {"footprint_growth": taken}
        return Finding(f"the process grew by {taken} bytes; {zeros}", figures)

    def _write(self) -> Finding:
        """A chunk, a chunk over the edge of a block, and a decoded row."""
        worst = self.compute(0, 0, self._edge - 1)
        worst = max(worst, self.compute(0, self._edge - 1, 4))
        worst = max(worst, self.compute(0, self._edge + 3, 1))
        return Finding(f"attention differs by {worst:.1e}", {"greatest_difference": worst})

    def _read_back(self) -> Finding:
        return self.read(0, self._edge + 4)

    def _share(self) -> Finding:
        mapped = self._backend.map(1, 0, 0, 0, 1, writable=False)
        require(mapped, "the system refuses a second mapping")
        self._map_writable(1, 1, 2)
        self._backend.finish_mappings()
        return self.read(1, self._edge, last=self._edge + 1)

    def _copy(self) -> Finding:
        self._backend.copy_block(0, 1, 1, 1, tokens=4)
        self.read(1, self._edge + 4)
        worst = self.compute(1, self._edge + 4, 1)
        copied = self._backend.copied_bytes
        said = f"{copied} bytes; attention over both differs by {worst:.1e}"
        return Finding(said, {"copied_bytes": copied, "greatest_difference": worst})

    def _unmap(self) -> Finding:
        return self._take_away(0, 2 if self._backend.shares_blocks else 1)

    def _read_other(self) -> Finding:
        return self.read(1, self._edge + 5)

    def _map_again(self) -> Finding:
        """A block that has been written before."""
        self._map_writable(0, 0, 1 if self._backend.shares_blocks else 0)
        self._backend.finish_mappings()
        zeros = self._fresh(0, self._group.tokens_per_block)
        self.compute(0, 0, 3)
        return Finding(f"{zeros}; {self.read(0, 3).said}")

    def _unmap_all(self) -> Finding:
        if self._backend.shares_blocks:
            self._take_away(1, 2)
        return self._take_away(0, 1)

    def _release(self) -> Finding:
        return release_once(self._backend, self._group.blocks_per_heap, self._group.heap_bytes)

    def _end(self) -> Finding:
        require(self._backend.shut_down(), "the device did not answer")
        return Finding("in order")

    # --- what they are made of ------------------------------------------------------------------

    def _map_writable(self, buffer: int, block: int, heap_block: int) -> None:
        mapped = self._backend.map(buffer, block, 0, heap_block, 1, writable=True)
        require(mapped, "the system refuses a mapping")

    def _take_away(self, buffer: int, count: int) -> Finding:
        finish(self._backend, self._backend.unmap(buffer, 0, count))
        return Finding(f"{count} blocks")

    def compute(self, buffer: int, start: int, count: int) -> float:
        """A step over rows of a buffer whose past is written; the greatest error of attention."""
        rows = self._backend.rows([Segment(buffer, start, count)])
        its = slice(start, start + count)
        attended, wanted, seen = [], [], some_of(count)
        for number, layer in enumerate(self.layers):
            keys, values = self._written.regions[2 * number : 2 * number + 2]
            queries = self._written.queries(number, start, count)
            token, asked = rows.append(
                self.tokens[number],
                layer,
                mx.array(queries).astype(layer.dtype),
                mx.array(keys[its]),
                mx.array(values[its]),
                None,
            )
            if count == 1:
                attended.append(rows.decode_attention(token, layer, asked, SCALE))
            else:
                attended.append(rows.chunk_attention(token, layer, asked, 0, SCALE))
            past = slice(0, start + count)
            wanted.append(attention(queries[seen], keys[past], values[past], start + seen, SCALE))
            self.tokens[number] = token
        mx.eval(rows.end(attended + self.tokens))
        worst = max(
            float(np.abs(np.array(got.astype(mx.float32))[seen] - want).max())
            for got, want in zip(attended, wanted, strict=True)
        )
        require(worst <= TOLERANCE, f"attention differs by {worst:.1e}")
        return worst

    def rows_of(self, layer: int, start: int, count: int) -> list[NDArray[np.float32]]:
        """The keys and the values of those positions."""
        its = slice(start, start + count)
        return [array[its] for array in self._written.regions[2 * layer : 2 * layer + 2]]

    def queries(self, layer: int, start: int, count: int) -> NDArray[np.float32]:
        """What those positions look for."""
        return self._written.queries(layer, start, count)

    def read(self, buffer: int, tokens: int, last: int | None = None) -> Finding:
        """Compares all regions of a buffer with what was written. last: how many tokens the buffer
        has, where the tokens' own block may only be read."""
        for number, found in enumerate(self._regions(buffer, last or tokens)):
            wrong = (found[:tokens] != self._written.regions[number][:tokens]).any(axis=(1, 2))
            require(not wrong.any(), f"{wrong.sum()} rows of region {number} are wrong")
        return Finding(f"{tokens} rows of every region are right")

    def _fresh(self, buffer: int, tokens: int) -> str:
        """What blocks hold that have just been mapped writable."""
        if not self._backend.zeroes_blocks:
            return "what it holds is not promised"
        for number, found in enumerate(self._regions(buffer, tokens)):
            require(not found.any(), f"region {number} of a fresh block is not zero")
        return "it holds zeros"

    def _regions(self, buffer: int, tokens: int) -> list[NDArray[np.float32]]:
        """What all regions hold. The last of the tokens is in a block that the buffer may write."""
        rows = self._backend.rows([Segment(buffer, tokens - 1, 1)])
        regions = [
            # A copy of MLX's own: memory of the GPU alone cannot be read from here.
            rows.region(token, layer, kind, 0).astype(mx.float32)
            for layer, token in zip(self.layers, self.tokens, strict=True)
            for kind in ("keys", "values")
        ]
        mx.eval(rows.end([*regions, *self.tokens]))
        return [np.array(region) for region in regions]


def release_once(backend: PageBackend, blocks: int, heap_bytes: int) -> Finding:
    """Maps all of heap 0 behind buffer 0, takes it away, releases it: the process must shrink."""
    _map_with_memory(backend, blocks)
    mapped = process_footprint()
    finish(backend, backend.unmap(0, 0, blocks))
    finish(backend, backend.release(0, 0, blocks))
    returned = mapped - process_footprint()
    charged = backend.committed_bytes()
    said = f"of {heap_bytes} bytes {returned} came back"
    require(returned >= RETURNED_SHARE * heap_bytes, said)
    return Finding(said, {"heap": heap_bytes, "returned": returned, "charged_after": charged})


def _map_with_memory(backend: PageBackend, blocks: int) -> None:
    if not backend.maps_while_running:
        require(backend.commit_heap(0), "the system refuses the memory of a heap")
        require(backend.map(0, 0, 0, 0, blocks, writable=True), "the system refuses a mapping")
        backend.finish_mappings()
        return
    ticket = backend.map_ahead(0, 0, 0, 0, blocks)
    finish(backend, ticket)
    require(not backend.refused(ticket), "the system refuses a mapping")


def finish(backend: PageBackend, ticket: int) -> None:
    """Waits for an operation."""
    require(backend.wait(ticket, MAPPING_LIMIT_S), f"it took over {MAPPING_LIMIT_S:.0f} s")
    backend.completed_ticket()  # what failed is not done


def require(condition: bool, otherwise: str) -> None:
    """Raises NotAsPromisedError."""
    if not condition:
        raise NotAsPromisedError(otherwise)


# Buffers without which nothing is tried: the system may refuse the others, as it may while serving.
NEEDED_BUFFERS = 3
# Rows of a block that are written; a step's own memory grows with them.
MOST_ROWS = 32


class RealSizeTrial:
    """Three buffers that are used, and as many more as there may be."""

    def __init__(self, backend: PageBackend, layout: KVLayout, buffers: int) -> None:
        self._backend = backend
        (self._group,) = layout.groups
        self._buffers = buffers
        self._life = SubstrateTrial(backend, layout)
        self._rows = min(self._group.tokens_per_block, MOST_ROWS)
        self._shared = min(self._group.blocks_per_heap, self._group.blocks_per_buffer)

    def actions(self) -> list[tuple[str, Action]]:
        """All that is tried, in order."""
        return [
            ("real buffers", self._make),
            ("last block", self._last_block),
            ("real end", self._end),
        ]

    def _make(self) -> Finding:
        heaps = [self._backend.add_heap() for _ in range(1 + -(-2 // self._group.blocks_per_heap))]
        count = 0
        while all(heaps) and count < self._buffers and self._backend.add_buffer():
            count += 1
        size = self._group.max_tokens * self._group.bytes_per_token
        require(count >= NEEDED_BUFFERS, f"only {count} buffers can be made")
        said = f"{count} of {self._buffers} buffers of {size} bytes of addresses"
        return Finding(said, {"buffers": count, "buffer_bytes": size})

    def _last_block(self) -> Finding:
        """From the first block of one buffer to the last of another, and to a third one's first.
        All before that last one are the first heap's blocks, over and over, which cost nothing."""
        shared, last = self._shared, self._group.blocks_per_buffer - 1
        self._map(0, 0, 0, 0, shared, writable=True)
        self._backend.finish_mappings()
        worst = self._life.compute(0, 0, self._rows)
        for block in range(0, last, shared):
            self._map(1, block, 0, 0, min(shared, last - block), writable=False)
        for number, (buffer, block) in enumerate([(1, last), (2, 0)]):
            heap, place = divmod(number, self._group.blocks_per_heap)
            self._map(buffer, block, 1 + heap, place, 1, writable=True)
        self._backend.finish_mappings()
        self._backend.copy_block(0, 0, 1, last, tokens=self._rows)
        self._backend.copy_block(1, last, 2, 0, tokens=self._rows)
        found = self._life.read(2, self._rows)
        for buffer, count in ((0, shared), (1, last + 1), (2, 1)):
            finish(self._backend, self._backend.unmap(buffer, 0, count))
        return Finding(f"block {last}: {found.said}", {"block": last, "greatest_difference": worst})

    def _map(
        self, buffer: int, block: int, heap: int, place: int, count: int, *, writable: bool
    ) -> None:
        mapped = self._backend.map(buffer, block, heap, place, count, writable=writable)
        require(mapped, "the system refuses a mapping")

    def _end(self) -> Finding:
        require(self._backend.shut_down(), "the device did not answer")
        return Finding("in order")
