"""Physical blocks with contents, and the places where they are mapped."""

from array import array
from dataclasses import dataclass
from enum import Enum

SLOT_BYTES = 8
POISON = 0xDEAD_BEEF_DEAD_BEEF
POISON_BYTES = POISON.to_bytes(SLOT_BYTES, "little")


class MistakeError(AssertionError):
    """What on a device would be a wrong answer or a panic."""


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
    """Places where it is mapped, those that come or go included."""
    releasing: bool = False
    touched: bool = False
    """Whether it holds memory of the system."""
    epoch: int = 0
    """The newest step that wrote to it."""
    owner: object = None
    """With whom its contents may be shared."""
    writer: object = None
    """Who wrote them."""

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
    """What stands behind one block of a buffer."""

    block: Block
    writable: bool
    state: MappingState
