"""Allocates state slots, each with all recurrent layers' states of one sequence at one position.

::

    free -> held: one sequence writes the slot -> waiting for the last step to end -> free
              |                                        ^
              v                                        | (no sequence has it or can find it)
            sealed: found by a prefix, held by all sequences that continue from it
              |
              v
            cached: found by a prefix, held by no sequence -> evicted -> free

A sealed slot is never written again. A slot is reused only after the last step that may use it.

The slot of least worth is evicted first. A slot saves some tokens from being computed again; their
number counts as often as a prompt is likely to continue from the slot. Using a slot also uses its
conversation's earlier slots."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvcache.evictor import Evictions, UseClock
from kvcache.stats import SlotStats

# The most slots of one sequence: one for the last block boundary, one for the next, one working.
SLOTS_PER_SEQUENCE = 3
# The states after this many newest turns of a conversation are kept longer than waypoints.
ENDS_PER_CONVERSATION = 2
# The number of slots that a conversation keeps longer than waypoints: after the newest turns, the
# system prompt and the newest user message.
SLOTS_PER_CONVERSATION = 2 + ENDS_PER_CONVERSATION


class Retention(IntEnum):
    """The reason for keeping a state slot. If several reasons apply, the highest one counts."""

    WAYPOINT = 0
    """The slot is within a long prompt. Prompts with the same beginning can continue there."""
    END = 1
    """The slot is at the end of a turn, or where two conversations begin to differ."""
    USER = 2
    """The slot follows the newest user message. Later prompts may omit the reasoning after it."""
    SYSTEM = 3
    """The slot follows the system prompt and the tools."""


# Rough relative likelihoods that a later prompt continues from a slot. A prompt continues after a
# user message if clients drop reasoning, or if slots at the ends of later turns are evicted. Any
# other slot is worth more than a waypoint (a slot at a position within a long prompt).
LIKELIHOOD = {
    Retention.WAYPOINT: 1e-6,
    Retention.END: 1.0,
    Retention.USER: 2.0,
    Retention.SYSTEM: 1.0,
}
EARLIER_END_LIKELIHOOD = 0.1


@dataclass(slots=True, eq=False)
class Slot:
    """A state slot: the states of all recurrent layers of one sequence at one position."""

    number: int
    holders: int = 0
    """The number of the slot's users: open sequences, and entries in the queue for sealing."""
    epoch: int = 0
    """The number of the newest step that may read or write the slot."""
    digest: bytes | None = None
    """The hash of the tokens that the states have read, or None while the slot is not sealed."""
    position: int = 0
    """The number of tokens that the states have read. Set when the slot is sealed."""
    conversation: int = 0
    """The conversation's id: the id of the sequence that sealed the conversation's first slot."""
    retention: Retention = Retention.WAYPOINT
    before: "Slot | None" = None
    """The previous slot of the same conversation, or None for the first slot."""
    is_earlier_end: bool = False
    """True if the conversation also has a slot at the end of a later turn."""
    last_use: int = 0
    dirty: bool = False
    """True if the slot may occupy physical memory."""

    @property
    def is_cached(self) -> bool:
        """True if new sequences can find the slot and no open sequence uses it."""
        return self.digest is not None and not self.holders

    @property
    def saves(self) -> int:
        """The number of tokens that must be computed again if the slot is evicted."""
        return self.position - (0 if self.before is None else self.before.position)

    def __str__(self) -> str:
        return f"slot {self.number}"


class StateSegment(NamedTuple):
    """The state slots of one sequence in a step: one slot is read, others are written."""

    count: int  # type: ignore[assignment]  # not the method of tuples
    read: int | None
    """The number of the slot that holds the states before the step's rows, or None for zeros."""
    writes: tuple[tuple[int, int], ...]
    """``(rows, slot)``, ascending: the slot gets the states after this number of rows. The last
    pair's slot may be the one that is read. Rows after the last pair are drafts."""


class SlotPool:
    """All state slots of a model, and the choice of slots to evict."""

    def __init__(self, capacity: int, commit: Callable[[int], bool], clock: UseClock) -> None:
        """``commit`` is StateMemory's."""
        self._clock = clock
        self._commit = commit
        self.slots = [Slot(number) for number in range(capacity)]
        self._free = list(reversed(self.slots))
        self._waiting: list[Slot] = []
        """Slots that no sequence uses, but that a step in flight may still read or write."""
        self._sealed: dict[bytes, Slot] = {}
        """The sealed slots, by the hashes of the tokens that their states have read."""
        self._completed_epoch = 0
        self.evicted = Evictions()
        """The hashes of the prefixes whose slots were evicted."""
        self.num_evicted = 0

    @property
    def expendable(self) -> int:
        """The number of slots that can be taken without evicting slots other than waypoints."""
        return len(self._free) + sum(
            slot.retention is Retention.WAYPOINT for slot in self._evictable()
        )

    @property
    def recovering(self) -> bool:
        """True if more slots can be taken after the steps in flight have completed."""
        done = self._completed_epoch
        return bool(self._waiting) or any(c.is_cached and c.epoch > done for c in self.slots)

    def stats(self, slot_bytes: int, committed_bytes: int) -> SlotStats:
        cached = dict.fromkeys(Retention, 0)
        for slot in self.slots:
            if slot.is_cached:
                cached[slot.retention] += 1
        return SlotStats(
            slots=len(self.slots),
            free=len(self._free),
            held=sum(slot.holders > 0 for slot in self.slots),
            cached=tuple((retention.name.lower(), count) for retention, count in cached.items()),
            waiting=len(self._waiting),
            evicted=self.num_evicted,
            slot_bytes=slot_bytes,
            committed_bytes=committed_bytes,
        )

    def take_for(self, retention: Retention, saves: int) -> Slot | None:
        """Take a slot for states, or return None if that would evict a slot that is worth more.
        ``saves`` is the number of tokens that need not be computed again with these states."""
        cheapest = None if self._free else self.cheapest()
        if cheapest is not None and self.worth(cheapest) > LIKELIHOOD[retention] * saves:
            return None
        return self.take()

    def take(self) -> Slot | None:
        """Take a free slot, or evict one and take it. Return None if neither is possible."""
        while not (self._free and self._commit(self._free[-1].number)):
            if not self.evict():
                return None
        slot = self._free.pop()
        assert not slot.holders, f"{slot} is held"
        assert slot.digest is None, f"{slot} can be found"
        slot.holders, slot.dirty, slot.retention = 1, True, Retention.WAYPOINT
        return slot

    def let_go(self, slot: Slot) -> None:
        """Note that a slot lost a user. Free it if no user is left and no prompt can find it."""
        assert slot.holders > 0, f"{slot} has no holder"
        slot.holders -= 1
        self._free_if_lost(slot)

    def find(self, digest: bytes) -> Slot | None:
        return self._sealed.get(digest)

    def seal(self, slot: Slot, digest: bytes, retention: Retention, position: int) -> None:
        """Let sequences find a slot by the hash of its tokens. The step that wrote the slot has
        completed."""
        assert digest not in self._sealed, f"a slot stands where {slot} is to stand"
        assert slot.digest is None, f"{slot} is sealed"
        slot.digest, slot.retention, self._sealed[digest] = digest, retention, slot
        slot.position = position
        self.evicted.discard(digest)

    def use(self, chain: Iterable[Slot]) -> None:
        """Note that a sequence uses ``chain``, the slots of a conversation in order."""
        self._clock.tick()
        before = newest_end = None
        for slot in chain:
            slot.before, slot.last_use, slot.is_earlier_end = before, self._clock.now, False
            if slot.retention is Retention.END:
                if newest_end is not None:
                    newest_end.is_earlier_end = True
                newest_end = slot
            before = slot

    def leave(self, slot: Slot) -> None:
        """Make the slots after ``slot`` waypoints: the conversation continues differently now."""
        for other in self.slots:
            before = other.before
            while before is not None and before is not slot:
                before = before.before
            if before is not None:
                other.retention = Retention.WAYPOINT

    def forget(self, slot: Slot, *, evicted: bool) -> None:
        """Remove a sealed slot from the index. ``evicted`` is False if the slot's contents may be
        wrong; the removal then does not count as an eviction."""
        assert slot.digest is not None, f"{slot} cannot be found"
        if evicted:
            self.evicted.add(slot.digest)
            self.num_evicted += 1
        del self._sealed[slot.digest]
        slot.digest = None
        for other in self.slots:
            if other.before is slot:
                other.before = slot.before
        slot.before = None
        self._free_if_lost(slot)

    def evict(self) -> bool:
        """Evict the cheapest slot. Return False if there is none."""
        slot = self.cheapest()
        if slot is not None:
            self.forget(slot, evicted=True)
        return slot is not None

    def cheapest(self) -> Slot | None:
        """Return the cached slot of least worth that no step uses, or None if there is none."""
        return min(self._evictable(), key=self.worth, default=None)

    def _evictable(self) -> list[Slot]:
        done = self._completed_epoch
        return [slot for slot in self.slots if slot.is_cached and slot.epoch <= done]

    def worth(self, slot: Slot) -> float:
        likelihood = EARLIER_END_LIKELIHOOD if slot.is_earlier_end else LIKELIHOOD[slot.retention]
        return self._clock.worth(likelihood * slot.saves, slot.last_use)

    def advance(self, completed_epoch: int) -> None:
        self._completed_epoch = completed_epoch
        waiting, self._waiting = self._waiting, []
        for slot in waiting:
            (self._free if slot.epoch <= completed_epoch else self._waiting).append(slot)

    def clean(self) -> list[Slot]:
        """Return the free slots that may occupy physical memory, for the caller to release."""
        slots = [slot for slot in self._free if slot.dirty]
        for slot in slots:
            slot.dirty = False
        return slots

    def _free_if_lost(self, slot: Slot) -> None:
        if not slot.holders and slot.digest is None:
            done = slot.epoch <= self._completed_epoch
            (self._free if done else self._waiting).append(slot)

    def check_invariants(self, holders: Iterable[Slot]) -> None:
        """``holders`` contains each slot as often as the slot has users."""
        counted = dict.fromkeys(self.slots, 0)
        for slot in holders:
            counted[slot] += 1
        lost = {*self._free, *self._waiting}
        assert len(lost) == len(self._free) + len(self._waiting), "a slot is free twice"
        stats = self.stats(0, 0)
        parts = stats.free + stats.held + sum(dict(stats.cached).values()) + stats.waiting
        assert parts == stats.slots, f"{stats}: the parts are not the whole"
        for slot, count in counted.items():
            assert slot.holders == count, f"{slot} has {slot.holders} holders, not {count}"
            assert (slot in lost) == (not count and slot.digest is None), f"{slot} has leaked"
            if slot.digest is not None:
                assert self._sealed.get(slot.digest) is slot, f"{slot} is found elsewhere"
