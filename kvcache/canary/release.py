"""Whether this machine can release heaps while others are in use: the one thing that is tried only
when a person asks for it, because on some Macs it has brought the system down."""

from kvcache.backend import PageBackend, Releases
from kvcache.canary.trial import Action, Finding, SubstrateTrial, release_once, require
from kvcache.layout import KVLayout

ROUNDS = 8


class ReleaseTrial:
    """Heap 0 comes and goes behind buffer 0, while buffer 1 is computed with in heap 1."""

    def __init__(self, backend: PageBackend, layout: KVLayout) -> None:
        self._backend = backend
        (self._group,) = layout.groups
        self._life = SubstrateTrial(backend, layout)

    def actions(self) -> list[tuple[str, Action]]:
        """All that is tried, in order."""
        rounds = [(f"round {number}", self._round(number)) for number in range(1, ROUNDS + 1)]
        return [("make", self._make), *rounds, ("end", self._end)]

    def _make(self) -> Finding:
        kept = self._backend.releases is Releases.NOTHING
        require(not kept, "this substrate keeps its heaps")
        made = all([self._backend.add_heap(), self._backend.add_heap()])
        made = made and self._backend.add_buffer() and self._backend.add_buffer()
        require(made, "the system refuses a heap or a buffer")
        require(self._backend.map(1, 0, 1, 0, 1, writable=True), "the system refuses a mapping")
        self._backend.finish_mappings()
        return Finding("two heaps, two buffers")

    def _round(self, number: int) -> Action:
        def action() -> Finding:
            # The rows before this round's were written while the heap was there.
            self._life.compute(1, number - 1, 1)
            found = release_once(self._backend, self._group.blocks_per_heap, self._group.heap_bytes)
            self._life.read(1, number, last=number)
            return found

        return action

    def _end(self) -> Finding:
        require(self._backend.shut_down(), "the device did not answer")
        return Finding("in order")
