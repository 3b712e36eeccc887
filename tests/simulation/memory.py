"""Device memory with contents, and every rule about it that a substrate relies on.

Reading or writing what is not mapped, writing what others read, mapping over a mapping, handing out
memory that something still points to: on a device these are wrong answers or a panic. Here each one
is a SimulationError that names the place.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvcache.backend import Charge, Releases, Segment
from kvcache.layout import Group
from tests.simulation.blocks import (
    POISON,
    POISON_BYTES,
    Block,
    Mapping,
    MappingState,
    SimulationError,
)
from tests.simulation.faults import MemoryFaults


@dataclass(slots=True)
class SimulatedMemory:
    """A PageBackend. Operations with a ticket are done some polls later, in order."""

    group: Group
    rng: Random
    faults: MemoryFaults
    slowness: float = 0.0
    """0 to 1: how often a poll finds that nothing more is done. At 0 everything is."""
    releases: Releases = Releases.BLOCKS
    charge: Charge = Charge.BLOCKS
    zeroes_blocks: bool = False
    mapping_limit: int | None = None
    shares_blocks: bool = True
    heap_limit: int | None = None
    max_sharers: int = 1000
    """Buffers in which the cache may map a block."""
    name: str = "simulated"
    copied_bytes: int = 0
    copies: int = 0
    begun: int = 0
    """Mappings that were begun."""
    completed_epoch: int = 0
    """The newest step that the device has finished."""
    mappings: dict[tuple[int, int], Mapping] = field(default_factory=dict)
    """By (buffer, block)."""
    _heaps: list[list[Block]] = field(default_factory=list)
    _buffers: int = 0
    _issued: int = 0
    _completed: int = 0
    _queue: deque[Callable[[], None]] = field(default_factory=deque)
    _ahead: set[int] = field(default_factory=set)
    """Tickets of map_ahead whose outcome nobody has asked for."""
    _refused: set[int] = field(default_factory=set)

    # --- what the cache calls -------------------------------------------------------------------

    def add_heap(self) -> bool:
        number = len(self._heaps)
        if self.heap_limit is not None and number >= self.heap_limit:
            raise SimulationError(f"heap {number} is beyond the limit of {self.heap_limit}")
        if self.faults.refuse():
            return False
        stale = array("Q", [POISON]) * self.group.tokens_per_block
        places = range(self.group.blocks_per_heap)
        self._heaps.append([Block(number, place, stale[:]) for place in places])
        return True

    def add_buffer(self) -> bool:
        if self.faults.refuse():
            return False
        self._buffers += 1
        return True

    def map(
        self,
        buffer: int,
        block: int,
        heap: int,
        heap_block: int,
        count: int,
        writable: bool,
    ) -> bool:
        blocks = self._blocks(heap, heap_block, count)
        self._check_places(buffer, block, count)
        if self.faults.refuse():
            return False
        for number, physical in enumerate(blocks, block):
            self._begin(buffer, number, physical, writable, MappingState.MAPPED)
        self._check_mapping_limit()
        return True

    def map_ahead(self, buffer: int, block: int, heap: int, heap_block: int, count: int) -> int:
        blocks = self._blocks(heap, heap_block, count)
        self._check_places(buffer, block, count)
        refused = self.faults.refuse()
        if refused:
            self._refused.add(self._issued + 1)
        started = [
            self._begin(buffer, number, physical, True, MappingState.COMING)
            for number, physical in enumerate(blocks, block)
        ]
        self._check_mapping_limit()
        self._ahead.add(self._issued + 1)

        def done() -> None:
            for number, mapping in enumerate(started, block):
                if mapping.state is not MappingState.COMING:
                    continue  # unmapped since, which comes after this
                if refused:
                    self._end(buffer, number)
                else:
                    mapping.state = MappingState.MAPPED

        return self._later(done)

    def refused(self, ticket: int) -> bool:
        if ticket > self._completed:
            raise SimulationError(f"the outcome of ticket {ticket} is not known yet")
        if ticket not in self._ahead:
            raise SimulationError(f"ticket {ticket} maps nothing, or was asked about before")
        self._ahead.discard(ticket)
        return ticket in self._refused

    def unmap(self, buffer: int, block: int, count: int) -> int:
        for number in range(block, block + count):
            mapping = self._mapping(buffer, number)
            if mapping.state is MappingState.GOING:
                raise SimulationError(f"block {number} of buffer {buffer} is unmapped twice")
            mapping.state = MappingState.GOING

        def done() -> None:
            for number in range(block, block + count):
                self._end(buffer, number)

        return self._later(done)

    def release(self, heap: int, block: int, count: int) -> int:
        if self.releases is Releases.NOTHING:
            raise SimulationError(f"heap {heap} gives back memory that is kept")
        whole = count == self.group.blocks_per_heap
        if not whole and self.releases is not Releases.BLOCKS:
            raise SimulationError(f"{count} blocks of heap {heap} are no whole heap")
        blocks = self._blocks(heap, block, count)
        for physical in blocks:
            if physical.mappings:
                raise SimulationError(f"{physical} is released while it is mapped")
            if physical.releasing:
                raise SimulationError(f"{physical} is released twice")
            physical.releasing = True
            physical.poison()

        def done() -> None:
            for physical in blocks:
                physical.releasing = physical.touched = False

        return self._later(done)

    def completed_ticket(self) -> int:
        if self._queue and self.rng.random() >= self.slowness:
            waiting = len(self._queue)
            done = self.rng.randint(1, waiting) if self.slowness else waiting
            for _ in range(done):
                self._complete_one()
        return self._completed

    def wait(self, ticket: int, timeout_s: float) -> bool:
        if ticket > self._issued:
            raise SimulationError(f"ticket {ticket} was never issued")
        if ticket > self._completed and self.faults.stick():
            return False
        while self._completed < ticket:
            self._complete_one()
        return True

    def copy_block(
        self, source: int, source_block: int, target: int, target_block: int, tokens: int
    ) -> None:
        taken = self._readable(source, source_block).block
        given = self._writable(target, target_block).block
        if tokens < 1 or POISON in taken.slots[:tokens] or tokens > self.group.tokens_per_block:
            raise SimulationError(f"{taken} is copied beyond what it holds")
        given.slots[:tokens] = taken.slots[:tokens]
        given.owner = taken.owner
        self.copies += 1
        self.copied_bytes += tokens * self.group.bytes_per_token

    def committed_bytes(self) -> int:
        per_heap = [sum(block.touched for block in heap) for heap in self._heaps]
        if self.charge is Charge.ALL:
            return len(self._heaps) * self.group.heap_bytes
        if self.charge is Charge.HEAPS:
            per_heap = [bool(touched) * self.group.blocks_per_heap for touched in per_heap]
        return sum(per_heap) * self.group.block_bytes

    def rows(self, segments: Sequence[Segment]) -> Any:
        return None

    def shut_down(self) -> bool:
        return True

    @property
    def unfriendly(self) -> bool:
        """Whether a request may have been refused memory that the cache could have."""
        return self.faults.refused > 0 or self.mapping_limit is not None

    # --- what the device does -------------------------------------------------------------------

    def read(self, buffer: int, tokens: int) -> list[tuple[Block, bytes]]:
        """The blocks behind a buffer's first tokens, and what these tokens' slots hold."""
        size = self.group.tokens_per_block
        found = []
        for number in range(self.group.blocks_for(tokens)):
            block = self._readable(buffer, number).block
            found.append((block, block.slots[: tokens - number * size].tobytes()))
        return found

    def slot(self, buffer: int, token: int) -> int:
        """What the slot of one token holds."""
        number, slot = divmod(token, self.group.tokens_per_block)
        return self._readable(buffer, number).block.slots[slot]

    def write(
        self, buffer: int, start: int, slots: "array[int]", epoch: int, owner: object
    ) -> None:
        """A step writes the slots of tokens ``start`` and beyond."""
        size = self.group.tokens_per_block
        written = 0
        while written < len(slots):
            number, first = divmod(start + written, size)
            block = self._writable(buffer, number).block
            part = slots[written : written + size - first]
            if block.slots[first : first + len(part)].tobytes() != POISON_BYTES * len(part):
                raise SimulationError(f"{block} is written twice from slot {first} on")
            block.slots[first : first + len(part)] = part
            block.epoch, block.owner = epoch, owner
            written += len(part)

    def forget(self, buffer: int, start: int, count: int) -> None:
        """A step that wrote these slots was dropped: another one will."""
        for slot in range(start, start + count):
            number, place = divmod(slot, self.group.tokens_per_block)
            self._writable(buffer, number).block.slots[place] = POISON

    # --- inside ---------------------------------------------------------------------------------

    def _blocks(self, heap: int, place: int, count: int) -> list[Block]:
        if not 0 <= heap < len(self._heaps):
            raise SimulationError(f"there is no heap {heap}")
        if count < 1 or not 0 <= place <= self.group.blocks_per_heap - count:
            raise SimulationError(f"heap {heap} has no blocks {place} to {place + count}")
        return self._heaps[heap][place : place + count]

    def _check_places(self, buffer: int, block: int, count: int) -> None:
        if not 0 <= buffer < self._buffers:
            raise SimulationError(f"there is no buffer {buffer}")
        if not 0 <= block <= self.group.blocks_per_buffer - count:
            raise SimulationError(f"buffer {buffer} has no blocks {block} to {block + count}")
        for number in range(block, block + count):
            if (old := self.mappings.get((buffer, number))) is not None:
                raise SimulationError(
                    f"block {number} of buffer {buffer} {old.state.value} and is mapped over"
                )

    def _begin(
        self, buffer: int, number: int, block: Block, writable: bool, state: MappingState
    ) -> Mapping:
        if block.releasing:
            raise SimulationError(f"{block} is mapped while its memory goes back")
        if writable:
            if block.mappings:
                raise SimulationError(f"{block} becomes writable while it is mapped elsewhere")
            block.poison()
        else:
            self._check_shareable(block)
        self.begun += 1
        block.mappings += 1
        block.touched = True
        mapping = self.mappings[buffer, number] = Mapping(block, writable, state)
        return mapping

    def _check_shareable(self, block: Block) -> None:
        if not self.shares_blocks:
            raise SimulationError(f"{block} is shared, and this memory cannot")
        if block.mappings >= self.max_sharers:
            raise SimulationError(f"{block} has more than {self.max_sharers} mappings")
        if block.epoch > self.completed_epoch:
            raise SimulationError(f"{block} is shared before step {block.epoch} has written it")
        if POISON in block.slots:
            raise SimulationError(f"{block} is shared and is not full")

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
            raise SimulationError(f"{runs} runs are more than {self.mapping_limit} mappings")

    def _end(self, buffer: int, number: int) -> None:
        mapping = self.mappings.pop((buffer, number))
        mapping.block.mappings -= 1

    def _mapping(self, buffer: int, number: int) -> Mapping:
        mapping = self.mappings.get((buffer, number))
        if mapping is None:
            raise SimulationError(f"block {number} of buffer {buffer} is not mapped")
        return mapping

    def _readable(self, buffer: int, number: int) -> Mapping:
        mapping = self._mapping(buffer, number)
        if mapping.state is not MappingState.MAPPED:
            raise SimulationError(f"block {number} of buffer {buffer} {mapping.state.value}")
        return mapping

    def _writable(self, buffer: int, number: int) -> Mapping:
        mapping = self._readable(buffer, number)
        if not mapping.writable:
            raise SimulationError(f"block {number} of buffer {buffer} may only be read")
        if mapping.block.mappings > 1:
            raise SimulationError(f"{mapping.block} is written while others have it mapped")
        return mapping

    def _later(self, done: Callable[[], None]) -> int:
        self._issued += 1
        self._queue.append(done)
        return self._issued

    def _complete_one(self) -> None:
        self._queue.popleft()()
        self._completed += 1
