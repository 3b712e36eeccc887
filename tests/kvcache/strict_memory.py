"""The one stand-in for memory below the cache, with every rule that a backend relies on.

Reading or writing what is not mapped, writing what others read, mapping over a mapping, handing out
memory that something still points to: on a device these are wrong answers or a panic. Here each one
is a MistakeError that names the place. Tests of the cache, property tests and the simulator share
it: they choose when operations are done and refused, and whether blocks have contents. It is long
because every rule is about the same mappings.
"""

import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any
from zlib import crc32

from kvcache.backends.backend import BackendFailedError, Releases, Segment
from kvcache.layout import Group
from tests.kvcache.blocks import (
    POISON,
    POISON_BYTES,
    SLOT_BYTES,
    Block,
    Mapping,
    MappingState,
    MistakeError,
    read_image,
    write_image,
)
from tests.kvcache.memory_faults import MemoryFaults


class Manners(Enum):
    """How a system takes memory back: fields of a backend."""

    BLOCKS = Releases.BLOCKS
    HEAPS = Releases.HEAPS
    IDLE = Releases.IDLE
    NOTHING = Releases.NOTHING
    ARENA = Releases.ARENA

    @property
    def fields(self) -> dict[str, Any]:
        return {"releases": self.value}


@dataclass(slots=True)
class StrictMemory:
    """A PageBackend. Operations with a ticket are done in order: at once, or some polls later, or
    when ``complete`` is called or their ticket is waited for."""

    group: Group
    at_once: bool = True
    slowness: float = 1.0
    """How often a poll finds that nothing more is done, where nothing is done at once. At 0 every
    poll finds all done, at 1 none finds anything."""
    holds_contents: bool = False
    """Whether every token is written: only then are the contents of shared and copied blocks
    checked."""
    faults: MemoryFaults = field(default_factory=MemoryFaults)
    rng: Random = field(default_factory=lambda: Random(0))
    releases: Releases = Releases.BLOCKS
    zeroes_blocks: bool = False
    mapping_limit: int | None = None
    shares_blocks: bool = True
    maps_while_running: bool = True
    heap_limit: int | None = None
    max_sharers: int = 1000
    """Buffers in which the cache may map a block."""
    name: str = "strict"
    copied_bytes: int = 0
    late_signals: int = 0
    command_buffers: int = 0
    copies: int = 0
    points: int = 0
    """Mapping points at which anything was mapped or unmapped."""
    begun: int = 0
    """Mappings that were begun."""
    completed_epoch: int = 0
    """The newest step that the device has finished."""
    opened_epoch: int = 0
    """The newest step that was begun."""
    buffers: int = 0
    issued: int = 0
    completed: int = 0
    """Tickets, in order."""
    owners: dict[int, object] = field(default_factory=dict)
    """Of the blocks that were written to files, by the files' numbers."""
    released: list[tuple[int, int, int]] = field(default_factory=list)
    """Heap, first block and count of every release."""
    mappings: dict[tuple[int, int], Mapping] = field(default_factory=dict)
    """By (buffer, block)."""
    _heaps: list[list[Block]] = field(default_factory=list)
    _queue: deque[Callable[[], None]] = field(default_factory=deque)
    _ahead: set[int] = field(default_factory=set)
    """Tickets of map_ahead whose outcome the cache has not read."""
    _refused: set[int] = field(default_factory=set)
    _has_memory: set[int] = field(default_factory=set)
    """Heaps, where memory does not come with the mapping."""
    _unfinished: list[Mapping] = field(default_factory=list)
    """Operations of this mapping point."""
    _begun_here: bool = False

    # --- what the cache calls -------------------------------------------------------------------

    def add_heap(self) -> bool:
        number = len(self._heaps)
        if self.heap_limit is not None and number >= self.heap_limit:
            raise MistakeError(f"heap {number} is beyond the limit of {self.heap_limit}")
        if self.faults.refuse():
            return False
        stale = array("Q", [POISON]) * self.group.tokens_per_block
        places = range(self.group.blocks_per_heap)
        self._heaps.append([Block(number, place, stale[:]) for place in places])
        return True

    def commit_heap(self, heap: int) -> bool:
        if not self.maps_while_running:
            if self.faults.refuse():
                return False
            self._has_memory.add(heap)
        return True

    def finish_mappings(self) -> None:
        if self._begun_here and self.faults.stick():
            raise BackendFailedError("a mapping operation took too long")
        self.points += self._begun_here
        self._begun_here = False
        for mapping in self._unfinished:
            mapping.state = MappingState.MAPPED
        self._unfinished.clear()

    def add_buffer(self) -> bool:
        if self.faults.refuse():
            return False
        self.buffers += 1
        return True

    def map(
        self, buffer: int, block: int, heap: int, heap_block: int, count: int, writable: bool
    ) -> bool:
        blocks = self._blocks(heap, heap_block, count)
        self._check_places(buffer, block, count)
        self._check_point("mapped")
        if self.maps_while_running and self.faults.refuse():
            return False
        if not self.maps_while_running and heap not in self._has_memory:
            raise MistakeError(f"heap {heap} is mapped and has no memory")
        now = MappingState.MAPPED if self.maps_while_running else MappingState.COMING
        for number, physical in enumerate(blocks, block):
            mapping = self._begin(buffer, number, physical, writable, now)
            physical.touched = True
            if not self.maps_while_running:
                self._unfinished.append(mapping)
        self._check_mapping_limit()
        return True

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        if not self.maps_while_running:
            raise MistakeError("memory is mapped ahead beside steps")
        blocks = self._blocks(heap, heap_block, count)
        self._check_places(buffer, block, count)
        refused = self.faults.refuse() or self.faults.refuse_ahead
        if refused:
            self._refused.add(self.issued + 1)
        started = [
            self._begin(buffer, number, physical, True, MappingState.COMING)
            for number, physical in enumerate(blocks, block)
        ]
        self._check_mapping_limit()
        self._ahead.add(self.issued + 1)

        def done() -> None:
            for number, mapping in enumerate(started, block):
                mapping.block.touched |= not refused
                if mapping.state is not MappingState.COMING:
                    continue  # unmapped since, which comes after this
                if refused:
                    self._end(buffer, number)
                else:
                    mapping.state = MappingState.MAPPED

        return self._later(done)

    def refused(self, ticket: int) -> bool:
        if ticket > self.completed:
            raise MistakeError(f"the outcome of ticket {ticket} is not known yet")
        if ticket not in self._ahead:
            raise MistakeError(f"ticket {ticket} maps nothing, or was asked about before")
        self._ahead.discard(ticket)
        return ticket in self._refused

    def unmap(self, buffer: int, block: int, count: int) -> int:
        for number in range(block, block + count):
            mapping = self._mapping(buffer, number)
            if mapping.state is MappingState.GOING:
                raise MistakeError(f"block {number} of buffer {buffer} is unmapped twice")
            mapping.state = MappingState.GOING

        def done() -> None:
            for number in range(block, block + count):
                self._end(buffer, number)

        if not self.maps_while_running:
            self._check_point("unmapped")
            done()  # what follows at this point is done after it
            return self.issued
        return self._later(done)

    def release(self, heap: int, block: int, count: int) -> int:
        if self.releases.keeps_heaps:
            raise MistakeError(f"heap {heap} gives back memory that is kept")
        whole = count == self.group.blocks_per_heap
        if not whole and self.releases is not Releases.BLOCKS:
            raise MistakeError(f"{count} blocks of heap {heap} are no whole heap")
        if not self.maps_while_running:
            self._check_point("released")
            self._has_memory.discard(heap)
        blocks = self._blocks(heap, block, count)
        self.released.append((heap, block, count))
        for physical in blocks:
            if physical.mappings:
                raise MistakeError(f"{physical} is released while it is mapped")
            if physical.releasing:
                raise MistakeError(f"{physical} is released twice")
            physical.releasing = True
            physical.poison()

        def done() -> None:
            for physical in blocks:
                physical.releasing = physical.touched = False

        return self._later(done)

    def complete(self) -> None:
        """Everything that was queued is done."""
        while self._queue:
            self._complete_one()

    def completed_ticket(self) -> int:
        if self._queue and self.rng.random() >= self.slowness:
            waiting = len(self._queue)
            done = self.rng.randint(1, waiting) if self.slowness else waiting
            for _ in range(done):
                self._complete_one()
        return self.completed

    def wait(self, ticket: int, timeout_s: float) -> bool:
        if ticket > self.issued:
            raise MistakeError(f"ticket {ticket} was never issued")
        if ticket > self.completed and self.faults.stick():
            return False
        while self.completed < ticket:
            self._complete_one()
        return True

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        taken = self._readable(source, source_block).block
        given = self._writable(target, target_block).block
        is_part = 0 < tokens <= self.group.tokens_per_block
        if not is_part or (self.holds_contents and POISON in taken.slots[:tokens]):
            raise MistakeError(f"{taken} is copied beyond what it holds")
        given.poison()
        given.slots[:tokens] = taken.slots[:tokens]
        given.owner = taken.owner
        self.copies += 1
        self.copied_bytes += tokens * self.group.bytes_per_token

    def write_block(self, buffer: int, block: int, fd: int, offset: int) -> int:
        taken = self._readable(buffer, block).block
        if self.holds_contents and POISON in taken.slots:
            raise MistakeError(f"{taken} is written to a file and is not full")
        self.owners[os.fstat(fd).st_ino] = taken.owner
        return write_image(fd, offset, taken.slots.tobytes(), self.group.block_bytes)

    def read_block(self, buffer: int, block: int, fd: int, offset: int) -> int:
        given = self._writable(buffer, block).block
        given.poison()
        image = read_image(fd, offset, self.group.block_bytes)
        slots = image[: len(given.slots) * SLOT_BYTES]
        given.slots = array("Q", slots)
        owner = self.owners.get(os.fstat(fd).st_ino)
        given.epoch, given.owner, given.writer = 0, owner, None
        return crc32(image)

    def committed_bytes(self) -> int:
        per_heap = [sum(block.touched for block in heap) for heap in self._heaps]
        if self.releases is Releases.ARENA:
            return len(self._heaps) * self.group.heap_bytes
        if self.releases is not Releases.BLOCKS:
            per_heap = [bool(touched) * self.group.blocks_per_heap for touched in per_heap]
        return sum(per_heap) * self.group.block_bytes

    def rows(self, segments: Sequence[Segment]) -> Any:
        self.opened_epoch += 1
        for segment in segments:
            end = self.group.blocks_for(segment.start + segment.count)
            first_written = segment.start // self.group.tokens_per_block
            for number in range(self._first(segment.start), end):
                check = self._readable if number < first_written else self._writable
                check(segment.buffer, number)
        return list(segments)

    def shut_down(self) -> bool:
        return self.faults.stuck_rate < 1.0

    @property
    def heaps(self) -> int:
        return len(self._heaps)

    @property
    def mapped(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(buffer, block) -> (heap, heap block), of what is mapped, also if not for long."""
        return {
            place: (mapping.block.heap, mapping.block.place)
            for place, mapping in self.mappings.items()
            if mapping.state is not MappingState.COMING
        }

    @property
    def unfriendly(self) -> bool:
        """Whether a request may have been refused memory that the cache could have."""
        return self.faults.refused > 0 or self.mapping_limit is not None

    # --- what the device does -------------------------------------------------------------------

    def _first(self, start: int) -> int:
        """The first block that a step from this position on reads."""
        before = self.group.window - 1 if self.group.window else start
        return max(0, start - before) // self.group.tokens_per_block

    def read(self, buffer: int, tokens: int, start: int = 0) -> list[tuple[Block, bytes]]:
        """The blocks behind a buffer's first tokens, and what these tokens' slots hold; without
        those that no step from ``start`` on reads."""
        size = self.group.tokens_per_block
        found = []
        for number in range(self._first(start), self.group.blocks_for(tokens)):
            block = self._readable(buffer, number).block
            found.append((block, block.slots[: tokens - number * size].tobytes()))
        return found

    def slot(self, buffer: int, token: int) -> int:
        """Return the contents of one token's slot."""
        number, slot = divmod(token, self.group.tokens_per_block)
        return self._readable(buffer, number).block.slots[slot]

    def write(
        self,
        buffer: int,
        start: int,
        slots: "array[int]",
        epoch: int,
        owner: object,
        writer: object = None,
    ) -> None:
        """A step writes the slots of tokens ``start`` and beyond. writer: a sequence's life."""
        size = self.group.tokens_per_block
        written = 0
        while written < len(slots):
            number, first = divmod(start + written, size)
            block = self._writable(buffer, number).block
            part = slots[written : written + size - first]
            if block.writer != writer and first == 0:
                block.poison()  # it was kept from the sequence that had this buffer before
            if block.slots[first : first + len(part)].tobytes() != POISON_BYTES * len(part):
                raise MistakeError(f"{block} is written twice from slot {first} on")
            block.slots[first : first + len(part)] = part
            block.epoch, block.owner, block.writer = epoch, owner, writer
            written += len(part)

    def forget(self, buffer: int, start: int, count: int) -> None:
        """A step that wrote these slots was dropped: another one will."""
        for slot in range(start, start + count):
            number, place = divmod(slot, self.group.tokens_per_block)
            self._writable(buffer, number).block.slots[place] = POISON

    # --- inside ---------------------------------------------------------------------------------

    def _check_point(self, what: str) -> None:
        """At a mapping point no step is in flight."""
        if self.maps_while_running:
            return
        if self.opened_epoch > self.completed_epoch:
            raise MistakeError(f"memory is {what} while step {self.opened_epoch} is in flight")
        self._begun_here = True

    def _blocks(self, heap: int, place: int, count: int) -> list[Block]:
        if not 0 <= heap < len(self._heaps):
            raise MistakeError(f"there is no heap {heap}")
        if count < 1 or not 0 <= place <= self.group.blocks_per_heap - count:
            raise MistakeError(f"heap {heap} has no blocks {place} to {place + count}")
        return self._heaps[heap][place : place + count]

    def _check_places(self, buffer: int, block: int, count: int) -> None:
        if not 0 <= buffer < self.buffers:
            raise MistakeError(f"there is no buffer {buffer}")
        if not 0 <= block <= self.group.blocks_per_buffer - count:
            raise MistakeError(f"buffer {buffer} has no blocks {block} to {block + count}")
        for number in range(block, block + count):
            if (old := self.mappings.get((buffer, number))) is not None:
                raise MistakeError(
                    f"block {number} of buffer {buffer} {old.state.value} and is mapped over"
                )
        if self.group.has_ring:
            mapped = [number for its, number in self.mappings if its == buffer]
            if len(mapped) + count > self.group.ring_blocks:
                raise MistakeError(f"buffer {buffer} has no place for {count} more blocks")
            if mapped and max(mapped) >= block:
                raise MistakeError(f"block {block} of buffer {buffer} lies before a mapped one")

    def _begin(
        self, buffer: int, number: int, block: Block, writable: bool, state: MappingState
    ) -> Mapping:
        if block.releasing:
            raise MistakeError(f"{block} is mapped while its memory goes back")
        if writable:
            if block.mappings:
                raise MistakeError(f"{block} becomes writable while it is mapped elsewhere")
            block.poison()
        else:
            self._check_shareable(block)
        self.begun += 1
        block.mappings += 1
        mapping = self.mappings[buffer, number] = Mapping(block, writable, state)
        return mapping

    def _check_shareable(self, block: Block) -> None:
        if not self.shares_blocks:
            raise MistakeError(f"{block} is shared, and this memory cannot")
        if block.mappings >= self.max_sharers:
            raise MistakeError(f"{block} has more than {self.max_sharers} mappings")
        if block.epoch > self.completed_epoch:
            raise MistakeError(f"{block} is shared before step {block.epoch} has written it")
        if self.holds_contents and POISON in block.slots:
            raise MistakeError(f"{block} is shared and is not full")

    def _check_mapping_limit(self) -> None:
        """Each run takes a mapping in every region, and so does the gap behind a buffer's last."""
        if self.mapping_limit is None:
            return
        runs = len({buffer for buffer, _ in self.mappings})
        for (buffer, number), mapping in self.mappings.items():
            block, last = mapping.block, self.mappings.get((buffer, number - 1))
            if last is None or last.writable != mapping.writable:
                runs += 1
            else:
                runs += last.block.follower != (block.heap, block.place)
        if runs * len(self.group.regions) > self.mapping_limit:
            raise MistakeError(f"{runs} runs are more than {self.mapping_limit} mappings")

    def _end(self, buffer: int, number: int) -> None:
        mapping = self.mappings.pop((buffer, number))
        mapping.block.mappings -= 1

    def _mapping(self, buffer: int, number: int) -> Mapping:
        mapping = self.mappings.get((buffer, number))
        if mapping is None:
            raise MistakeError(f"block {number} of buffer {buffer} is not mapped")
        return mapping

    def _readable(self, buffer: int, number: int) -> Mapping:
        mapping = self._mapping(buffer, number)
        if mapping.state is not MappingState.MAPPED:
            raise MistakeError(f"block {number} of buffer {buffer} {mapping.state.value}")
        return mapping

    def _writable(self, buffer: int, number: int) -> Mapping:
        mapping = self._readable(buffer, number)
        if not mapping.writable:
            raise MistakeError(f"block {number} of buffer {buffer} may only be read")
        if mapping.block.mappings > 1:
            raise MistakeError(f"{mapping.block} is written while others have it mapped")
        return mapping

    def _later(self, done: Callable[[], None]) -> int:
        self.issued += 1
        self._queue.append(done)
        if self.at_once:
            self.complete()
        return self.issued

    def _complete_one(self) -> None:
        self._queue.popleft()()
        self.completed += 1
