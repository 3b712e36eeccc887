"""Self-tests that run only on request, because they have crashed some Macs: mappings that change
while commands run, and the release of heaps."""

import time

import mlx.core as mx
import numpy as np

from kvcache.backends.backend import PageBackend, Segment
from kvcache.layout import KVLayout
from kvcache.selftest.kv_backend import (
    SOFTMAX,
    TOLERANCE,
    Check,
    KVBackendChecks,
    NamedCheck,
    add,
    finish,
    map_blocks,
    release_heap,
    require,
    shut_down,
    unmap_blocks,
)
from kvcache.selftest.reference import attention
from kvcache.selftest.run import Result

ROUNDS = 50
RELEASE_ROUNDS = 8
# The wanted duration of a round's GPU commands, much longer than the round's mappings take.
LONG_S = 0.2
# The most attention operations per layer that a round submits.
MAX_REPEATS = 2000
GROWING, SHARING = 0, 1


class StressChecks(KVBackendChecks):
    """Each round gives buffer 0 one more block, and maps all earlier blocks of buffer 0 in buffer
    1. While many attention operations read buffer 0, the next block is mapped in buffer 0, and
    buffer 1's blocks are unmapped and mapped again. Then the round compares all contents."""

    def __init__(self, backend: PageBackend, layout: KVLayout, rounds: int = ROUNDS) -> None:
        self._block = layout.tokens_per_block
        super().__init__(backend, layout, (rounds + 1) * self._block)
        self._rounds = rounds
        self._repeats = 1
        self._overlapped = 0
        """The number of rounds whose mappings ended before their commands ended."""

    def checks(self) -> list[NamedCheck]:
        rounds = [(f"round {number}", self._round(number)) for number in range(1, self._rounds + 1)]
        return [("make", self._make), *rounds, ("end", self._end)]

    def _make(self) -> Result:
        add(self._backend, heaps=1, buffers=2)
        map_blocks(self._backend, GROWING, 0, 0, 2)
        self.compute(GROWING, 0, self._block)
        self._share_blocks(1)
        return Result(f"{self._rounds} rounds, blocks of {self._block} tokens")

    def _round(self, number: int) -> Check:
        """``number`` is the index of the block that buffer 0 fills. Earlier blocks are shared."""

        def check() -> Result:
            end = (number + 1) * self._block
            self.compute(GROWING, end - self._block, self._block - 1)
            started = time.monotonic()
            results = self._begin(end - 1)
            ahead = self._backend.map_ahead(GROWING, number + 1, 0, number + 1, 1)
            unmap_blocks(self._backend, SHARING, number + 1)
            self._share_blocks(number)
            finish(self._backend, ahead)
            mapped_s = time.monotonic() - started
            require(not self._backend.refused(ahead), "the system refuses a mapping")
            mx.eval(results, self.tokens)
            ran_s = time.monotonic() - started
            worst = self._compare(end - 1, results)
            self.read(SHARING, number * self._block, last=number * self._block + 1)
            # A step over the block mapped during this round reads all rows before that block.
            self.read(GROWING, end, last=end + 1)
            unmap_blocks(self._backend, SHARING, number + 1)
            self._share_blocks(number + 1)
            self._overlapped += mapped_s < ran_s
            wanted = self._repeats * LONG_S / max(ran_s, 1e-6)
            self._repeats = max(1, min(MAX_REPEATS, round(wanted)))
            text = f"mapped in {1e3 * mapped_s:.1f} ms, ran for {1e3 * ran_s:.1f} ms"
            figures = {"mapped_s": mapped_s, "ran_s": ran_s, "greatest_difference": worst}
            return Result(text, figures)

        return check

    def _end(self) -> Result:
        shut_down(self._backend)
        text = f"in {self._overlapped} of {self._rounds} rounds mappings ended before commands did"
        return Result(text, {"rounds": self._rounds, "overlapped": self._overlapped})

    # --- sharing blocks and running attention in a round ------------------------------------------

    def _share_blocks(self, blocks: int) -> None:
        """Map the first blocks of buffer 0 in buffer 1, then a block that buffer 1 can write."""
        map_blocks(self._backend, SHARING, 0, 0, blocks, writable=False)
        map_blocks(self._backend, SHARING, blocks, self._group.blocks_per_heap - 1)

    def _begin(self, position: int) -> list[mx.array]:
        """Append one row to buffer 0, and submit the row's attention many times in every layer."""
        rows = self._backend.rows([Segment(GROWING, position, 1)])
        results: list[mx.array] = []
        for number, layer in enumerate(self.layers):
            token, turned = self.append(rows, number, position, 1)
            results += [
                rows.decode_attention(token, layer, turned, SOFTMAX) for _ in range(self._repeats)
            ]
        mx.async_eval(*rows.end([*results, *self.tokens]))  # type: ignore[no-untyped-call]
        return results

    def _compare(self, position: int, results: list[mx.array]) -> float:
        worst = 0.0
        for number in range(len(self.layers)):
            queries = self.queries(number, position, 1)
            past = self.rows_of(number, 0, position + 1)
            want = attention(queries, *past, np.array([position]), SOFTMAX.scale)
            repeats = results[number * self._repeats : (number + 1) * self._repeats]
            got = np.array(mx.stack(repeats).astype(mx.float32))
            worst = max(worst, float(np.abs(got - want).max()))
        require(worst <= TOLERANCE, f"attention differs by {worst:.1e}")
        return worst


class ReleaseChecks(KVBackendChecks):
    """Again and again, maps heap 0 in buffer 0 and releases it, while buffer 1 uses heap 1."""

    def checks(self) -> list[NamedCheck]:
        rounds = [
            (f"round {number}", self._round(number)) for number in range(1, RELEASE_ROUNDS + 1)
        ]
        return [("make", self._make), *rounds, ("end", lambda: shut_down(self._backend))]

    def _make(self) -> Result:
        require(not self._backend.releases.keeps_heaps, "this backend keeps its heaps")
        add(self._backend, heaps=2, buffers=2)
        map_blocks(self._backend, 1, 0, 0, heap=1)
        self._backend.finish_mappings()
        return Result("two heaps, two buffers")

    def _round(self, number: int) -> Check:
        def check() -> Result:
            # This reads earlier rows of buffer 1, which were written before heap 0 was released.
            self.compute(1, number - 1, 1)
            result = release_heap(self._backend, self._group)
            self.read(1, number, last=number)
            return result

        return check
