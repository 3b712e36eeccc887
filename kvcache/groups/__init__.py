"""What the layers of a model keep: one kind of memory per file, behind the verbs of base.py."""

from collections.abc import Callable, Sequence

from kvcache.backends.backend import PageBackend, StateMemory
from kvcache.budget import CacheLimits
from kvcache.evictor import UseClock
from kvcache.groups.base import KVGroup
from kvcache.groups.full import FullGroup
from kvcache.groups.hidden import HiddenGroup
from kvcache.groups.state import StateGroup
from kvcache.groups.window import WindowGroup
from kvcache.layout import KVLayout
from kvcache.prefixes import PendingPrefixes


def make_groups(
    layout: KVLayout,
    backends: Sequence[PageBackend],
    limits: CacheLimits,
    states: StateMemory | None,
    pending: PendingPrefixes,
) -> list[KVGroup]:
    """Return the groups of a model. Pass one backend per group of ``layout``. ``states`` is memory
    for recurrent states, or None if the model has no recurrent layers."""
    blocks = layout.heap_blocks_within(limits.budget_bytes)
    clock = UseClock()
    rows = [
        (WindowGroup if group.window else FullGroup)(group, backend, limits, count, pending, clock)
        for group, backend, count in zip(layout.groups, backends, blocks, strict=True)
    ]
    groups: list[KVGroup] = [*rows]
    index, slot = rows[0].prefixes.index, layout.shape.slot
    can_begin: Callable[[bytes], bool] = index.__contains__
    if states is not None and slot is not None:
        group = StateGroup(slot, states, layout.tokens_per_block, clock, index.__contains__)
        index.on_removal = group.forget
        can_begin = group.can_begin
        groups.append(group)
    if layout.shape.hidden_size:
        groups.append(HiddenGroup(layout.tokens_per_block, layout.shape.hidden_size, can_begin))
    return groups
