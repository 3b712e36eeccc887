"""The one record of a physical block: page tables and the index of prefixes refer to it."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.cell_pool import Cell
    from kvcache.sparse_buffer import SparseBuffer


class BlockState(IntEnum):
    """The state of a block."""

    FREE = 0
    OWNED = 1
    SEALED = 2
    QUARANTINED = 3
    CACHED = 4
    RELEASING = 5


@dataclass(slots=True, eq=False)
class Prefix:
    """What a sealed block is found by: its tokens, and all that come before them."""

    digest: bytes
    parent: bytes
    tokens: bytes
    system: bool
    """Whether it belongs to a system prompt."""
    last_use: int = 0
    cell: "Cell | None" = None
    """The states of recurrent layers after its last token, where they are kept."""


@dataclass(slots=True, eq=False)
class Block:
    """A physical block and all that is known of it. The pool of heaps changes the state and the
    counts, the index of prefixes the prefix."""

    heap: int
    place: int
    """In the heap."""
    state: BlockState = BlockState.FREE
    dirty: bool = False
    """Whether it may hold memory of the system."""
    buffers: int = 0
    """How many have it mapped in their tables, those of closed sequences included."""
    sequences: int = 0
    """How many open ones have it."""
    prefix: Prefix | None = None
    """None where it cannot be found."""
    keepers: "list[SparseBuffer]" = field(default_factory=list)
    """Buffers that have it mapped behind their tables, of no sequence any more."""
    is_sealed: bool = False
    """Whether it was sealed since it was mapped: then no sequence may write it through that
    mapping."""

    @property
    def can_be_taken(self) -> bool:
        """Return whether it is free, and mapped nowhere."""
        return self.state is BlockState.FREE and not self.keepers

    @property
    def found_by(self) -> Prefix:
        """Return its prefix: it can be found."""
        assert self.prefix is not None, f"{self} cannot be found"
        return self.prefix

    def __str__(self) -> str:
        return f"block {self.place} of heap {self.heap}"
