"""Physical blocks with contents, and the places where they are mapped."""

import errno
import os
from array import array
from dataclasses import dataclass
from enum import Enum
from zlib import crc32

SLOT_BYTES = 8
POISON = 0xDEAD_BEEF_DEAD_BEEF
POISON_BYTES = POISON.to_bytes(SLOT_BYTES, "little")


class MistakeError(AssertionError):
    """A use of memory that would be a wrong answer or a panic on a device."""


class MappingState(Enum):
    """How far a mapping has come."""

    COMING = "is not mapped yet"
    MAPPED = "is mapped"
    GOING = "is being unmapped"


@dataclass(slots=True, eq=False)
class Block:
    """A physical block."""

    heap: int
    place: int
    slots: "array[int]"
    mappings: int = 0
    """Places where the block is mapped, pending ones included."""
    releasing: bool = False
    touched: bool = False
    """Whether the block holds memory of the system."""
    epoch: int = 0
    """The newest step that wrote to it."""
    owner: object = None
    """Only sequences of this owner may share the contents."""
    writer: object = None
    """The sequence that wrote the contents."""

    @property
    def follower(self) -> tuple[int, int]:
        """Heap and place of the block behind it."""
        return self.heap, self.place + 1

    def poison(self) -> None:
        """Its contents mean nothing any more."""
        self.slots = array("Q", [POISON]) * len(self.slots)

    def __str__(self) -> str:
        """As it is named in what goes wrong."""
        return f"block {self.place} of heap {self.heap}"


@dataclass(slots=True, eq=False)
class Mapping:
    """The mapping behind one block of a buffer."""

    block: Block
    writable: bool
    state: MappingState


def write_image(fd: int, offset: int, image: bytes, size: int) -> int:
    """Write contents as a record of so many bytes, and return a checksum of these."""
    record = image.ljust(size, b"\0")
    if len(record) != size or os.pwrite(fd, record, offset) != size:
        raise MistakeError(f"a record of {size} bytes cannot hold {len(image)}")
    return crc32(record)


def read_image(fd: int, offset: int, size: int) -> bytes:
    record = os.pread(fd, size, offset)
    if len(record) < size:
        raise OSError(errno.EIO, "the file ends before the record")
    return record
