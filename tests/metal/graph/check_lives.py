"""Sequences that come, grow, share, fork and go, step after step, in memory that is reused."""

import random

import mlx.core as mx
import pytest

from tests.metal.graph import _standin
from tests.metal.graph.stage import KINDS, Sequence, Shape, Stage

MOST_AT_ONCE = 4
STEPS = 25


class Life:
    """One random life of a backend."""

    def __init__(self, kind: str, seed: int) -> None:
        _standin.seed(seed)
        mx.random.seed(seed)
        self.random = random.Random(seed)
        splits = kind == "sparse" and seed % 2 == 0
        shape = Shape(kv_heads=1, query_heads=5, layers=2, blocks_per_range=3)
        self.stage = Stage(
            kind, shape, heaps=6, max_buffer_bytes=shape.blocks_per_range * 2 * 16384 * splits
        )
        assert self.stage.kv_backend.buffers_per_range == (2 if splits else 1)
        self.alive: list[Sequence] = []

    @property
    def most_tokens(self) -> int:
        return self.stage.shape.block_tokens * self.stage.shape.blocks_per_range

    def live(self) -> None:
        for _ in range(STEPS):
            if len(self.alive) < MOST_AT_ONCE:
                self.arrive()
            self.step()
            for sequence in [s for s in self.alive if self.random.random() < 0.15]:
                self.alive.remove(sequence)
                self.stage.close(sequence)
        self.stage.end()

    def arrive(self) -> None:
        """Sometimes with what another one has written, which is complete by now."""
        stage, lenders = self.stage, [s for s in self.alive if s.tokens >= self.stage.block_tokens]
        if stage.kind == "dense" or not lenders or self.random.random() < 0.4:
            self.alive.append(stage.open())
            return
        lender = self.random.choice(lenders)
        blocks, rest = divmod(lender.tokens, stage.block_tokens)
        sequence = stage.borrow(lender, blocks)
        if rest and self.random.random() < 0.5:
            stage.copy_tail(lender, sequence)
        self.alive.append(sequence)

    def step(self) -> None:
        """Rows of their own first, then chunks."""
        parts = []
        for sequence in self.alive:
            room = self.most_tokens - sequence.tokens
            longest = min(room, self.random.choice((1, 1, 7, 140)))
            if longest > 0 and self.random.random() < 0.8:
                parts.append((sequence, self.random.randint(1, longest)))
        for sequence, count in parts:
            self.stage.grow(sequence, sequence.tokens + count)
        if parts:
            self.stage.step(*sorted(parts, key=lambda part: part[1] > 1))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_what_sequences_see_is_theirs(kind: str, seed: int) -> None:
    Life(kind, seed).live()


@pytest.mark.parametrize("kind", ["sparse", "paged"])
def test_a_fork_goes_on_from_a_copy_of_the_partial_block(kind: str) -> None:
    stage = Stage(kind)
    lender = stage.open(200)
    stage.step((lender, 150))
    blocks, rest = divmod(150, stage.block_tokens)
    assert rest
    fork = stage.borrow(lender, blocks)
    stage.copy_tail(lender, fork)
    assert stage.counter.bytes == rest * 2 * stage.shape.layers * stage.shape.row_bytes
    stage.step((fork, 1), (lender, 1))
    stage.close(lender)
    stage.step((fork, 30))
    stage.end()
