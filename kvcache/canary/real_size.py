"""A cache as large as serving makes it: buffers with all of a model's addresses, and the last block
of one, which is written and read at its very end."""

from kvcache.backend import PageBackend
from kvcache.canary.trial import Action, Finding, SubstrateTrial, finish, require
from kvcache.layout import KVLayout

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
