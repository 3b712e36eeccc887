"""Memory behind windows on a CPU: what the system charges, and what a stray read meets."""

import time

import mlx.core as mx

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
WAIT_S = 10.0


class Sequence:
    """A sequence of a model whose layers all have windows."""

    def __init__(self, max_tokens: int) -> None:
        layout = paged_layout(
            SHAPE,
            max_tokens=max_tokens,
            heap_bytes=SYSTEM_PAGE_BYTES,
            system_page_bytes=SYSTEM_PAGE_BYTES,
            page_bytes=SYSTEM_PAGE_BYTES,
        )
        self.group = layout.groups[0]
        self.backend = PosixBackend(self.group, metal_ext.CpuWorkers(1))
        settings = CacheSettings(free_slack_bytes=0, prefix_cache=False)
        limits = CacheLimits(100 * layout.heap_bytes, 1, 2, settings, STEP)
        self.kv = KVCacheManager(layout, [self.backend], limits, identity=b"test")
        hashes = self.kv.block_hashes(PrefixSalt())
        hashes.extend([0] * max_tokens, 0)
        assert self.kv.open(1, hashes, max_tokens, final_tokens=max_tokens)

    def compute(self, start: int) -> None:
        """A step that writes ones in all layers, after which all that can leave has left."""
        assert self.kv.reserve(1, start + STEP)
        views = self.kv.views([(1, start, STEP)])
        rows = mx.ones((STEP, 1, 64))
        for layer in range(len(SHAPE.layers)):
            views.append(layer, rows, rows, rows, None)
        mx.eval(views.step_end([]))
        self.kv.commit(1, [0] * STEP)
        deadline = time.monotonic() + WAIT_S
        self.kv.step_completed(views.epoch)
        while self.kv.recovering:
            assert time.monotonic() < deadline, "blocks behind the window stay"
            self.kv.step_completed(views.epoch)

    def row_address(self, token: int) -> int:
        return self.backend._ranges[0].base_address + token * SHAPE.layers[0].row_bytes


def test_a_window_takes_as_many_bytes_after_2k_tokens_as_after_64k() -> None:
    sequence, committed = Sequence(64 * 1024), []
    for start in range(0, 64 * 1024, STEP):
        sequence.compute(start)
        committed.append(sequence.backend.committed_bytes())
    assert committed.pop() < committed[-1], "nothing is mapped ahead of the last token"
    flat = committed[2048 // STEP :]
    assert max(flat) - min(flat) <= sequence.group.block_bytes
    most = sequence.group.most_blocks(64 * 1024, STEP) + sequence.group.blocks_for(STEP)
    assert max(flat) <= most * sequence.group.block_bytes
    sequence.kv.check_invariants()


def test_a_read_below_the_window_is_a_segmentation_fault() -> None:
    done = run_program("""
        import ctypes, mlx.core as mx
        from tests.kvcache.backends.test_posix_windows import STEP, WINDOW, Sequence
        mx.set_default_device(mx.cpu)  # on a Mac it is the GPU
        sequence = Sequence(2048)
        [sequence.compute(start) for start in range(0, 2048, STEP)]
        tokens = sequence.group.tokens_per_block
        address = sequence.row_address((2049 - WINDOW) // tokens * tokens)
        print(ctypes.c_float.from_address(address).value, flush=True)
        print(ctypes.c_float.from_address(address - 4).value)
    """)
    assert (done.stdout, done.returncode) == ("1.0\n", SEGMENTATION_FAULT), done.stderr
