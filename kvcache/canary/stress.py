"""Whether mappings may change while commands run that use the same buffer and the same memory: what
serving does, and what a trial that does one thing after the other does not try."""

import time

import mlx.core as mx
import numpy as np

from kvcache.backend import PageBackend, Segment
from kvcache.canary.reference import attention
from kvcache.canary.trial import SCALE, TOLERANCE, Action, Finding, SubstrateTrial, finish, require
from kvcache.layout import KVLayout

ROUNDS = 50
# How long the commands of a round should run: far longer than its mappings take.
LONG_S = 0.2
# Attentions of one row that a round's commands are made of, in every layer.
MOST_REPEATS = 2000
GROWING, SHARING = 0, 1


class StressTrial:
    """Buffer 0 grows by a block in every round, and buffer 1 shares all that it has filled before.
    While the attention of buffer 0's newest row runs, many times, its next block is mapped ahead,
    and what it shares with buffer 1 is unmapped there and mapped again. Then all is compared."""

    def __init__(self, backend: PageBackend, layout: KVLayout, rounds: int = ROUNDS) -> None:
        self._backend = backend
        (group,) = layout.groups
        self._block = group.tokens_per_block
        self._last_heap_block = group.blocks_per_heap - 1
        self._rounds = rounds
        self._life = SubstrateTrial(backend, layout, (rounds + 1) * self._block)
        self._repeats = 1
        self._overlapped = 0
        """Rounds whose mappings were over before their commands were."""

    def actions(self) -> list[tuple[str, Action]]:
        """All that is tried, in order."""
        rounds = [(f"round {number}", self._round(number)) for number in range(1, self._rounds + 1)]
        return [("make", self._make), *rounds, ("end", self._end)]

    def _make(self) -> Finding:
        made = self._backend.add_heap() and self._backend.add_buffer()
        require(made and self._backend.add_buffer(), "the system refuses a heap or a buffer")
        mapped = self._backend.map(GROWING, 0, 0, 0, 2, writable=True)
        require(mapped, "the system refuses a mapping")
        self._life.compute(GROWING, 0, self._block)
        self._share(1)
        return Finding(f"{self._rounds} rounds, blocks of {self._block} tokens")

    def _round(self, number: int) -> Action:
        """number: of the block that buffer 0 fills; those before it are shared."""

        def action() -> Finding:
            end = (number + 1) * self._block
            self._life.compute(GROWING, end - self._block, self._block - 1)
            started = time.monotonic()
            results = self._begin(end - 1)
            ahead = self._backend.map_ahead(GROWING, number + 1, 0, number + 1, 1)
            finish(self._backend, self._backend.unmap(SHARING, 0, number + 1))
            self._share(number)
            finish(self._backend, ahead)
            mapped_s = time.monotonic() - started
            require(not self._backend.refused(ahead), "the system refuses a mapping")
            mx.eval(results, self._life.tokens)
            ran_s = time.monotonic() - started
            worst = self._compare(end - 1, results)
            self._life.read(SHARING, number * self._block, last=number * self._block + 1)
            # A step over what was mapped ahead reads all before it.
            self._life.read(GROWING, end, last=end + 1)
            finish(self._backend, self._backend.unmap(SHARING, 0, number + 1))
            self._share(number + 1)
            return self._timed(mapped_s, ran_s, worst)

        return action

    def _end(self) -> Finding:
        require(self._backend.shut_down(), "the device did not answer")
        said = f"in {self._overlapped} of {self._rounds} rounds mappings ended before commands did"
        return Finding(said, {"rounds": self._rounds, "overlapped": self._overlapped})

    # --- what a round is made of ----------------------------------------------------------------

    def _share(self, blocks: int) -> None:
        """Behind buffer 1: the first blocks of buffer 0, and one of its own to write to."""
        for block, heap_block, count, writable in (
            (0, 0, blocks, False),
            (blocks, self._last_heap_block, 1, True),
        ):
            mapped = self._backend.map(SHARING, block, 0, heap_block, count, writable=writable)
            require(mapped, "the system refuses a second mapping")

    def _begin(self, position: int) -> list[mx.array]:
        """Appends the row of buffer 0 at the position, and submits its attention, many times, layer
        by layer."""
        rows = self._backend.rows([Segment(GROWING, position, 1)])
        results: list[mx.array] = []
        for number, layer in enumerate(self._life.layers):
            keys, values = self._life.rows_of(number, position, 1)
            token, asked = rows.append(
                self._life.tokens[number],
                layer,
                mx.array(self._life.queries(number, position, 1)).astype(layer.dtype),
                mx.array(keys),
                mx.array(values),
                None,
            )
            results += [
                rows.decode_attention(token, layer, asked, SCALE) for _ in range(self._repeats)
            ]
            self._life.tokens[number] = token
        mx.async_eval(*rows.end([*results, *self._life.tokens]))  # type: ignore[no-untyped-call]
        return results

    def _compare(self, position: int, results: list[mx.array]) -> float:
        worst = 0.0
        for number in range(len(self._life.layers)):
            queries = self._life.queries(number, position, 1)
            keys, values = self._life.rows_of(number, 0, position + 1)
            want = attention(queries, keys, values, np.array([position]), SCALE)
            mine = results[number * self._repeats : (number + 1) * self._repeats]
            got = np.array(mx.stack(mine).astype(mx.float32))
            worst = max(worst, float(np.abs(got - want).max()))
        require(worst <= TOLERANCE, f"attention differs by {worst:.1e}")
        return worst

    def _timed(self, mapped_s: float, ran_s: float, worst: float) -> Finding:
        """Chooses how long the next round's commands are."""
        self._overlapped += mapped_s < ran_s
        wanted = self._repeats * LONG_S / max(ran_s, 1e-6)
        self._repeats = max(1, min(MOST_REPEATS, round(wanted)))
        said = f"mapped in {1e3 * mapped_s:.1f} ms, ran for {1e3 * ran_s:.1f} ms"
        figures = {"mapped_s": mapped_s, "ran_s": ran_s, "greatest_difference": worst}
        return Finding(said, figures)
