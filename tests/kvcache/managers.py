"""Small caches for tests, and the steps of a sequence in them."""

from collections.abc import Sequence
from typing import Any

from engine.step.sequence import Sequence as WaitingSequence
from kvcache.backends.backend import PageBackend, StateMemory
from kvcache.block_hashes import PrefixSalt
from kvcache.budget import CacheLimits
from kvcache.config import CacheSettings
from kvcache.groups.full import FullGroup
from kvcache.groups.state import StateGroup
from kvcache.layout import KVFormat, KVLayout, KVShape, KVSpec, paged_layout
from kvcache.manager import KVCacheManager
from kvcache.records import Block, BlockState
from kvcache.sequences import PromptBoundaries
from tests.kvcache.strict_memory import StrictMemory

SHAPE = KVShape.uniform(1, KVSpec(1, 64, KVFormat.FLOAT32))
TOKENS = 16  # per block
BLOCK = 2 * 4096
HEAP_BLOCKS = 4


def paged(max_tokens: int = 320) -> KVLayout:
    """Four blocks of 16 tokens a heap."""
    return paged_layout(
        SHAPE,
        max_tokens=max_tokens,
        heap_bytes=HEAP_BLOCKS * BLOCK,
        system_page_bytes=4096,
        page_bytes=4096,
    )


def two_groups(max_tokens: int = 320) -> KVLayout:
    """The same, and a layer with rows and pages that are twice as large."""
    shape = KVShape((*SHAPE.layers, KVSpec(1, 128, KVFormat.FLOAT32)))
    return paged_layout(
        shape,
        max_tokens=max_tokens,
        heap_bytes=HEAP_BLOCKS * TOKENS * shape.bytes_per_token,
        system_page_bytes=4096,
    )


def windowed(max_tokens: int = 320, window: int = 24) -> KVLayout:
    """The same, and a layer with a window."""
    shape = KVShape((*SHAPE.layers, KVSpec(1, 64, KVFormat.FLOAT32, window)))
    return paged_layout(
        shape,
        max_tokens=max_tokens,
        heap_bytes=HEAP_BLOCKS * TOKENS * shape.bytes_per_token,
        system_page_bytes=4096,
        page_bytes=4096,
    )


def manager(
    layout: KVLayout,
    backend: PageBackend | list[PageBackend],
    *,
    budget_bytes: int,
    max_sequences: int = 4,
    free_slack_bytes: int = 0,
    max_sharers: int = 1000,
    shares_prefixes: bool = True,
    states: StateMemory | None = None,
) -> KVCacheManager:
    """A cache around any backend, or one for every group."""
    backends = backend if isinstance(backend, list) else [backend]
    settings = CacheSettings(
        free_slack_bytes=free_slack_bytes, max_sharers=max_sharers, prefix_cache=shares_prefixes
    )
    limits = CacheLimits(budget_bytes, max_sequences, 2 * max_sequences, settings)
    return KVCacheManager(layout, backends, limits, identity=b"test", states=states)


def small_manager(
    layout: KVLayout | None = None,
    *,
    heaps: int = 2,
    sequences: int = 4,
    max_sharers: int = 1000,
    shares_prefixes: bool = True,
    **changes: Any,
) -> tuple[KVCacheManager, StrictMemory]:
    """A cache over strict memory. changes: its fields."""
    layout = layout or paged()
    backend = StrictMemory(layout.groups[0], **changes)
    kv = manager(
        layout,
        backend,
        budget_bytes=heaps * layout.groups[0].heap_bytes,
        max_sequences=sequences,
        max_sharers=max_sharers,
        shares_prefixes=shares_prefixes,
    )
    return kv, backend


def join(
    kv: KVCacheManager,
    seq_id: int,
    prompt: int | Sequence[int],
    *,
    final: int | None = None,
    system: int = 0,
    salt: PrefixSalt | None = None,
) -> bool:
    """Opens a sequence. prompt: its ids, or how many of its own kind."""
    ids = [seq_id] * prompt if isinstance(prompt, int) else prompt
    hashes = kv.block_hashes(salt or PrefixSalt())
    hashes.extend(ids, 0)
    final = len(ids) if final is None else final
    ends = PromptBoundaries(system)
    return bool(kv.open(seq_id, hashes, len(ids), final_tokens=final, boundaries=ends))


def grow(
    kv: KVCacheManager, seq_id: int, start: int, count: int, ids: Sequence[int] | None = None
) -> int:
    """A step that computes tokens [start, start + count); returns its epoch."""
    assert kv.reserve(seq_id, start + count)
    epoch = kv.views([(seq_id, start, count)]).epoch
    kv.commit(seq_id, [seq_id] * count if ids is None else ids[start : start + count])
    kv.check_invariants()
    return epoch


def blocks_needed(kv: KVCacheManager, waiting: WaitingSequence) -> int:
    """Free blocks that a sequence's admission takes: those of its tokens and of one more if there
    will be one, but for those that others have mapped."""
    hashes = kv.block_hashes(waiting.request.salt)
    hashes.extend(waiting.token_ids, 0)
    prefix = full_group(kv).prefixes.match(hashes, 0, hashes.shareable_blocks)
    tokens = min(waiting.num_tokens + 1, waiting.max_tokens - 1)
    unused = sum(block.state is BlockState.CACHED for block in prefix)
    return kv._layout.blocks_for(tokens) - len(prefix) + unused


def full_group(kv: KVCacheManager, number: int = 0) -> FullGroup:
    group = kv._groups[number]
    assert isinstance(group, FullGroup)
    return group


def state_group(kv: KVCacheManager) -> StateGroup:
    return next(group for group in kv._groups if isinstance(group, StateGroup))


def blocks_of(kv: KVCacheManager, seq_id: int) -> list[Block]:
    """The blocks of an open sequence in the first group."""
    return list(full_group(kv)._open[seq_id].blocks)


def epochs_of(kv: KVCacheManager) -> tuple[int, int]:
    """The newest epoch that was opened, and the newest that has completed."""
    return kv._issued_epoch, kv._completed_epoch


def complete_steps(kv: KVCacheManager) -> None:
    """Every step that was begun completes."""
    kv.step_completed(kv._issued_epoch)


def settle(kv: KVCacheManager, backend: StrictMemory) -> None:
    """All steps complete and all memory operations are done."""
    for _ in range(3):
        complete_steps(kv)
        backend.complete()
    complete_steps(kv)
    kv.check_invariants()
