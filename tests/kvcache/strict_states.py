"""Slots that hold numbers instead of states, and find every use that a device would not forgive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, NamedTuple
from zlib import crc32

from kvcache.layout import KVShape, SlotLayout, StateSpec
from kvcache.slots import StateSegment
from tests.kvcache.blocks import MistakeError, read_image, write_image
from tests.kvcache.memory_faults import MemoryFaults

# Two recurrent layers, so that what lies behind the first state is the second one.
STATES = (StateSpec(1, 2, 4, 4, tail_rows=3),) * 2
_NUMBERS = Struct("<QQ")
_MASK = (1 << 64) - 1


class _Use(NamedTuple):
    life: int
    epoch: int
    writes: bool


@dataclass(slots=True)
class StrictStates:
    """A slot holds, for each layer, where its matrix lies: how many tokens the state has seen, and
    what came of them; where the rows of its convolution lie: what came of the newest tokens."""

    num_slots: int
    layout: SlotLayout = field(default_factory=lambda: _layout(STATES))
    completed_epoch: int = 0
    released: int = 0
    written: set[int] = field(default_factory=set)
    """Slots with memory."""
    wrong: set[int] = field(default_factory=set)
    """Slots that were written last behind rows that are wrong."""
    room: int = 1 << 20
    """Slots that the system gives memory."""
    releases_slots: bool = True
    faults: MemoryFaults = field(default_factory=MemoryFaults)
    allocated: set[int] = field(default_factory=set)
    _memory: bytearray = field(init=False)
    _uses: dict[int, list[_Use]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._memory = bytearray(self.num_slots * self.layout.slot_bytes)

    @property
    def slot_bytes(self) -> int:
        return self.layout.slot_bytes

    def commit(self, slot: int) -> bool:
        is_full = len(self.allocated) == self.room
        if slot not in self.allocated and (is_full or self.faults.refuse()):
            return False
        self.allocated.add(slot)
        return True

    def rows(self, segments: Sequence[StateSegment], step: object) -> Any:
        """The segments themselves: who plays the device goes through them."""
        return segments

    def write_record(self, slot: int, fd: int, offset: int) -> int:
        self._check_still(slot, writes=False)
        if slot in self.wrong:
            raise MistakeError(f"slot {slot} goes to a file, and is wrong")
        size = self.slot_bytes
        return write_image(fd, offset, bytes(self._memory[slot * size : (slot + 1) * size]), size)

    def read_record(self, slot: int, fd: int, offset: int) -> int:
        self._check_still(slot, writes=True)
        size = self.slot_bytes
        image = read_image(fd, offset, size)
        self._memory[slot * size : (slot + 1) * size] = image
        self.written.add(slot)
        self.wrong.discard(slot)
        return crc32(image)

    def _check_still(self, slot: int, *, writes: bool) -> None:
        """No step writes the slot, nor reads what a file fills."""
        if slot not in self.allocated:
            raise MistakeError(f"slot {slot} has no memory")
        for use in self._uses.get(slot, []):
            if use.epoch > self.completed_epoch and (use.writes or writes):
                raise MistakeError(f"slot {slot} is moved beside {use}")

    def committed_bytes(self, slots: Sequence[int]) -> int:
        if missing := self.written - set(slots):
            raise MistakeError(f"nobody knows that slots {missing} hold memory")
        return len(self.written) * self.slot_bytes

    def release(self, slots: Sequence[int]) -> None:
        size = self.layout.slot_bytes
        for slot in slots:
            self._memory[slot * size : (slot + 1) * size] = bytes(size)
            self.written.discard(slot)
            self.released += 1

    def advance(
        self,
        segment: StateSegment,
        start: int,
        life: int,
        epoch: int,
        after: Callable[[int], int],
        drafts: int = 0,
    ) -> None:
        """Advance the states by a step's rows of one sequence, which begin at a position. after:
        the state after a number of the rows; 0: before the first; fewer: before earlier rows.
        drafts: last rows, which no state may have seen."""
        if segment.read is None and start:
            raise MistakeError(f"a step begins at {start} without a state")
        if segment.read is not None:
            self._use(segment.read, _Use(life, epoch, False))
            for at, image in self._images(segment.read, start, after, 0):
                if self._memory[at : at + len(image)] != image:
                    raise MistakeError(f"slot {segment.read} holds no state after {start} tokens")
        if not segment.writes or segment.writes[-1][0] != segment.count - drafts:
            raise MistakeError(f"the last state is not after the last certain row: {segment}")
        for rows, slot in segment.writes:
            self._use(slot, _Use(life, epoch, True))
            self.written.add(slot)
            for at, image in self._images(slot, start, after, rows):
                self._memory[at : at + len(image)] = image

    def _images(
        self, slot: int, start: int, after: Callable[[int], int], rows: int
    ) -> list[tuple[int, bytes]]:
        """The contents of a slot after a number of rows, and their places."""
        end = start + rows
        found = []
        for offset, spec in zip(self.layout.offsets, self.layout.states, strict=True):
            at = slot * self.layout.slot_bytes + offset
            found.append((at, _filled(spec.matrix_bytes, end, after(rows))))
            row_bytes = spec.tail_width * spec.format.itemsize
            at += spec.matrix_bytes
            for row in range(spec.tail_rows):
                seen = after(rows - row) if end > row else 0
                found.append((at + row * row_bytes, _filled(row_bytes, row, seen)))
        return found

    def _use(self, slot: int, use: _Use) -> None:
        """A sequence that takes the slot of another one waits until none of the other's steps
        runs."""
        if slot not in self.allocated:
            raise MistakeError(f"slot {slot} has no memory")
        running = [its for its in self._uses.get(slot, []) if its.epoch > self.completed_epoch]
        for other in running:
            if other.life != use.life and (other.writes or use.writes):
                raise MistakeError(f"slot {slot}: {use}, and {other} may still run")
        self._uses[slot] = [*running, use]


def _filled(size: int, number: int, other: int) -> bytes:
    return (_NUMBERS.pack(number, other & _MASK) * (size // _NUMBERS.size + 1))[:size]


def _layout(states: tuple[StateSpec, ...]) -> SlotLayout:
    slot = KVShape((), states).slot
    assert slot is not None
    return slot
