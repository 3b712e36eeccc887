"""Statistics of the cache's memory, and the reasons for misses."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class MissReason(Enum):
    """The reason that a prompt shares no more cached tokens: a name for reports, and an explanation
    for people. "There" is the position up to which K and V are cached."""

    NEVER_CACHED = "never_cached", "nobody with this key and salt has sent the tokens from there on"
    EVICTED = (
        "evicted",
        "the tokens from there on were evicted since, because memory was short or nobody used them "
        "for too long",
    )
    STATE_EVICTED = (
        "state_evicted",
        "the state of the recurrent layers there was evicted since, so all after an earlier state "
        "was computed again",
    )
    NO_STATE = (
        "no_state",
        "no state of the recurrent layers was kept there, so all after an earlier state was "
        "computed again",
    )

    WINDOW_EVICTED = (
        "window_evicted",
        "the tokens before a later position, of which layers with a window need the newest alone, "
        "were evicted since from these layers",
    )
    NO_WINDOW = (
        "no_window",
        "layers with a window kept too few tokens before any later position",
    )

    DISK_SLOWER = (
        "disk_slower",
        "the tokens from there on are on disk, and computing them was expected to be faster",
    )
    DISK_LATE = "disk_late", "the disk was slow or memory short, so tokens from there were computed"
    DISK_FAILED = (
        "disk_failed",
        "a record of the tokens from there on could not be read, so they were computed",
    )

    message: str

    def __new__(cls, name: str, message: str) -> "MissReason":
        reason = object.__new__(cls)
        reason._value_, reason.message = name, message
        return reason


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Prefixes in files. ``limit_bytes`` is 0 if none are kept."""

    held_bytes: int = 0
    limit_bytes: int = 0
    read_bytes: int = 0
    """The bytes that were read since the start, as ``written_bytes`` were written."""
    written_bytes: int = 0
    failures: int = 0
    """The number of records and batches that could not be read or written since the start."""
    pending_writes: int = 0
    """The number of records, and of ends of prompts and conversations, that will be written."""
    waiting_reads: int = 0
    """The number of prompts that wait for records."""


NO_DISK = DiskStats()


@dataclass(frozen=True, slots=True)
class SlotStats:
    """The numbers of state slots, by their use."""

    slots: int = 0
    free: int = 0
    held: int = 0
    """The number of slots with a user: an open sequence, or an entry in the queue for sealing."""
    cached: tuple[tuple[str, int], ...] = ()
    """``(reason, count)``: the number of unused slots that are kept for each reason."""
    waiting: int = 0
    """The number of slots that become free when the last step that may use them completes."""
    evicted: int = 0
    slot_bytes: int = 0
    committed_bytes: int = 0


NO_SLOTS = SlotStats()


@dataclass(frozen=True, slots=True)
class KVStats:
    """Bytes of K and V. Free, live, partial tail, mapped ahead, cached and quarantined bytes add up
    to the capacity. The other amounts of bytes are not part of that sum."""

    capacity_bytes: int = 0
    free_bytes: int = 0
    live_bytes: int = 0
    """Bytes of tokens of open sequences, with those of the running step, and of writes to disk."""
    partial_tail_bytes: int = 0
    """Bytes at the end of blocks that are only partly filled with live tokens."""
    mapped_ahead_bytes: int = 0
    """Bytes of the blocks of open sequences in which no token is stored yet."""
    cached_bytes: int = 0
    """Bytes of the blocks that are kept for prefix hits while no open sequence uses them."""
    quarantined_bytes: int = 0
    """Bytes of blocks that wait for the device, for unmapping, or for the release of memory."""
    free_slack_bytes: int = 0
    """Bytes of free blocks that may still occupy physical memory."""
    committed_bytes: int = 0
    """Bytes that the system charges for K, V and state slots."""
    num_heaps: int = 0
    kept_heaps: int = 0
    """The number of heaps that are never released: either all heaps or none."""
    num_sequences: int = 0
    block_bytes: int = 0
    block_tokens: int = 0
    capacity_tokens: int = 0
    """The number of tokens that fit, of which some are used or cached. Blocks count in whole. It is
    0 in the statistics of one group of layers."""
    used_tokens: int = 0
    cached_tokens: int = 0
    shared_saved_bytes: int = 0
    """Bytes of further blocks that open sequences would need if they shared none."""
    evicted_blocks: int = 0
    mapped_blocks: int = 0
    """The number of times that a block was mapped in a buffer since the start."""
    unmapped_blocks: int = 0
    late_signals: int = 0
    """The number of mapping points that waited for the signal of a step that had been read."""
    slots: SlotStats = NO_SLOTS

    @property
    def used_bytes(self) -> int:
        """Bytes that are neither free nor cached."""
        return self.capacity_bytes - self.free_bytes - self.cached_bytes

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"slots": asdict(self.slots) | {"cached": dict(self.slots.cached)}}


def total(groups: Sequence[KVStats], capacity_tokens: int) -> KVStats:
    """Add up the statistics of all groups of layers, except counts that are equal in all groups
    that have them. Tokens are used and cached as in the first group, which has no window if any
    group has none."""
    equal = {"num_sequences", "block_tokens"}
    columns = {
        name: [getattr(group, name) for group in groups] for name in KVStats.__dataclass_fields__
    }
    slots = max(columns.pop("slots"), key=lambda slots: slots.slots)
    sums = {name: (max if name in equal else sum)(column) for name, column in columns.items()}
    first = groups[0]
    for name in ("capacity", "used", "cached"):
        share = getattr(first, f"{name}_bytes")
        sums[f"{name}_tokens"] = capacity_tokens * share // first.capacity_bytes
    return KVStats(**sums, slots=slots)
