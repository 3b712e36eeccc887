"""Memory behind windows on a CPU: what the system charges, and what a stray read meets."""

import time
from dataclasses import replace

import mlx.core as mx
import pytest

import metal_ext
from kvcache.backends.posix import PosixBackend
from kvcache.block_hashes import PrefixSalt
from kvcache.budget import CacheLimits
from kvcache.config import CacheSettings
from kvcache.layout import KVFormat, KVShape, KVSpec, paged_layout
from kvcache.manager import KVCacheManager
from metal_ext import SYSTEM_PAGE_BYTES
from tests.metal_ext.programs import run_program
from tests.metal_ext.test_address_range import SEGMENTATION_FAULT

WINDOW, STEP = 256, 512
SHAPE = KVShape.uniform(2, KVSpec(1, 64, KVFormat.FLOAT32, WINDOW))
SOFTMAX = metal_ext.Softmax(0.125, window=WINDOW)
WAIT_S = 10.0
BLOCK = SYSTEM_PAGE_BYTES // SHAPE.layers[0].row_bytes
RING = (WINDOW + STEP) // BLOCK + 2


class Sequence:
    """A sequence of a model whose layers all have windows."""

    def __init__(self, max_tokens: int, ring_blocks: int = 0) -> None:
        layout = paged_layout(
            SHAPE,
            max_tokens=max_tokens,
            heap_bytes=SYSTEM_PAGE_BYTES,
            system_page_bytes=SYSTEM_PAGE_BYTES,
            page_bytes=SYSTEM_PAGE_BYTES,
        )
        self.group = replace(layout.groups[0], ring_blocks=ring_blocks)
        layout = replace(layout, groups=(self.group,))
        self.backend = PosixBackend(self.group, metal_ext.CpuWorkers(1))
        settings = CacheSettings(free_slack_bytes=0, prefix_cache=False)
        limits = CacheLimits(100 * layout.heap_bytes, 1, 2, settings, STEP)
        self.kv = KVCacheManager(layout, [self.backend], limits, identity=b"test")
        hashes = self.kv.block_hashes(PrefixSalt())
        hashes.extend([0] * max_tokens, 0)
        assert self.kv.open(1, hashes, max_tokens, final_tokens=max_tokens)

    def compute(self, start: int, count: int = STEP, *, seed: int | None = None) -> list[mx.array]:
        """A step that writes ones, or random rows, in all layers, after which all that can leave
        has left. Returns each layer's attention to the random rows."""
        assert self.kv.reserve(1, start + count)
        views, made = self.kv.views([(1, start, count)]), []
        shape = (3, len(SHAPE.layers), count, 1, 64)
        random = None if seed is None else mx.random.normal(shape, key=mx.random.key(seed))
        queries, keys, values = mx.ones(shape) if random is None else random
        for layer in range(len(SHAPE.layers)):
            turned = views.append(layer, queries[layer], keys[layer], values[layer], None)
            made += [] if random is None else [views.attend(layer, turned, SOFTMAX)]
        mx.eval(views.step_end(made))
        self.kv.commit(1, [0] * count)
        deadline = time.monotonic() + WAIT_S
        self.kv.step_completed(views.epoch)
        while self.kv.recovering:
            assert time.monotonic() < deadline, "blocks behind the window stay"
            self.kv.step_completed(views.epoch)
        return made

    def row_address(self, token: int) -> int:
        """The row's address; in a ring that never jumps, its second one."""
        if self.group.has_ring:
            token = token % (RING * BLOCK) + RING * BLOCK
        return self.backend._ranges[0].base_address + token * SHAPE.layers[0].row_bytes


@pytest.mark.parametrize("ring_blocks", [0, RING])
def test_a_window_takes_as_many_bytes_after_2k_tokens_as_after_64k(ring_blocks: int) -> None:
    sequence, committed = Sequence(64 * 1024, ring_blocks), []
    for start in range(0, 64 * 1024, STEP):
        sequence.compute(start)
        committed.append(sequence.backend.committed_bytes())
    assert committed.pop() < committed[-1], "nothing is mapped ahead of the last token"
    flat = committed[2048 // STEP :]
    assert max(flat) - min(flat) <= sequence.group.block_bytes
    most = sequence.group.most_blocks(64 * 1024, STEP) + sequence.group.blocks_for(STEP)
    assert max(flat) <= most * sequence.group.block_bytes
    sequence.kv.check_invariants()


@pytest.mark.parametrize("ring_blocks", [0, RING])
def test_a_read_below_the_window_is_a_segmentation_fault(ring_blocks: int) -> None:
    done = run_program(f"""
        import ctypes, mlx.core as mx
        from tests.kvcache.backends.test_posix_windows import STEP, WINDOW, Sequence
        mx.set_default_device(mx.cpu)  # on a Mac it is the GPU
        sequence = Sequence(4096, {ring_blocks})
        [sequence.compute(start) for start in range(0, 4096, STEP)]
        tokens = sequence.group.tokens_per_block
        address = sequence.row_address((4097 - WINDOW) // tokens * tokens)
        print(ctypes.c_float.from_address(address).value, flush=True)
        print(ctypes.c_float.from_address(address - 4).value)
    """)
    assert (done.stdout, done.returncode) == ("1.0\n", SEGMENTATION_FAULT), done.stderr


def test_attention_over_a_ring_has_the_bits_of_that_over_addresses_for_a_whole_context() -> None:
    line, ring = Sequence(16 * 1024), Sequence(16 * 1024, RING)
    assert 2 * RING * ring.group.block_bytes == ring.group.address_bytes < line.group.address_bytes
    start = 0
    while start < 8 * RING * BLOCK:  # around it eight times, in steps of all lengths
        count = (1, 1, 5, STEP, 100, 1, STEP - 3)[start % 7]
        for one, other in zip(
            *(s.compute(start, count, seed=start) for s in (line, ring)), strict=True
        ):
            assert mx.array_equal(one, other), start
        start += count
    ring.kv.check_invariants()


def test_a_chunk_that_a_ring_has_no_place_for_waits_until_blocks_have_left() -> None:
    sequence = Sequence(16 * 1024, RING)
    for start in range(0, 2048, STEP):
        sequence.compute(start)
    assert not sequence.kv.reserve(1, 2048 + RING * BLOCK)
    sequence.compute(2048)
