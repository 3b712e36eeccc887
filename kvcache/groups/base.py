"""The verbs of a group: the layers of a model that keep memory of one kind and one shape.

KVCacheManager knows groups by these verbs only. A position is a number of leading blocks, unless
its name ends with ``tokens``."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from kvcache import evictor
from kvcache.block_hashes import BlockHashes
from kvcache.inspector import KVMap
from kvcache.sequences import CachedSequence
from kvcache.stats import KVStats, MissReason
from kvcache.views import KVViews


class StepTokens(NamedTuple):
    """The tokens [start, start + count) that a step computes for a sequence."""

    seq_id: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    drafts: int = 0
    """The number of last tokens that the step may reject."""


StepPlan = Sequence[StepTokens]


@dataclass(slots=True, eq=False)
class Loan:
    """Pinned memory of a group, of which other threads write records to files, or read them from
    files. ``write(number, fd)`` and ``read(number, fd)`` transfer the record of one block number,
    and return its CRC-32C. They raise OSError."""

    sequence: CachedSequence
    numbers: Sequence[int]
    nbytes: int
    """The bytes of one record."""
    write: Callable[[int, int], int]
    read: Callable[[int, int], int]
    memory: Any
    """The pinned blocks, slot or bytes, as the group keeps them."""
    adopted: set[int] = field(default_factory=set)
    """The numbers of the records that were read and can be shared."""


InFiles = Callable[[int], bool]


def in_memory_alone(number: int) -> bool:
    """Say of each block that it is in no file."""
    return False


class KVGroup(ABC):
    """The memory that one group of layers keeps of all sequences. The methods that are not abstract
    are those of a group that keeps no rows of tokens, and so maps nothing while it serves."""

    @property
    def capacity_tokens(self) -> int:
        """The most tokens of a sequence that fit."""
        return sys.maxsize

    @property
    def wants_mapping_point(self) -> bool:
        """True if memory was refused only because mappings may not change while a step runs."""
        return False

    # --- opening sequences ------------------------------------------------------------------------

    def match(
        self, hashes: BlockHashes, start: int, at_most: int, in_files: InFiles = in_memory_alone
    ) -> int:
        """Return the greatest position up to ``at_most`` at which a sequence can begin, or
        ``start`` if there is none after it. The sequence has all blocks before ``start``. Records
        of which ``in_files`` returns True count as if they were in memory."""
        ends = range(at_most, start, -1)
        return next((n for n in ends if self.has(hashes, n - 1) or in_files(n - 1)), start)

    @abstractmethod
    def has_room(self, hashes: BlockHashes, num_tokens: int) -> bool:
        """Return False if a sequence of ``num_tokens`` tokens cannot be opened, whatever it may
        share."""

    @abstractmethod
    def open(self, sequence: CachedSequence, position: int, wanted: int, *, alone: bool) -> bool:
        """Open a sequence that begins at ``position``. Return False and change nothing if memory is
        short now. ``wanted`` is the greatest position at which any group could begin. ``alone``
        means that no other sequence is open."""

    def can_attach(self, seq_id: int) -> bool:
        """Return True if the sequence may go on from what other sequences have sealed."""
        return True

    @abstractmethod
    def attach(self, seq_id: int, position: int, parent_id: int | None = None) -> bool:
        """Go on at ``position``, with what other sequences have sealed up to there, or with what
        the parent has. Return False and change nothing if the system refuses."""

    def can_fork(self, seq_id: int, child_id: int, position: int) -> bool:
        """Return True if the child may share the parent's first ``position`` blocks, and copy the
        one after these."""
        return False

    def copy_block(  # noqa: B027  # never called where nothing can be forked
        self, seq_id: int, child_id: int, block: int, tokens: int
    ) -> None:
        """Copy the first ``tokens`` tokens of a block of the parent to the child's block."""

    def truncate(self, seq_id: int, position: int) -> None:  # noqa: B027  # nothing is mapped
        """Let go of all shared blocks from ``position`` on. No step has used them."""

    @abstractmethod
    def positions_to_share(self, seq_id: int) -> Collection[int]:
        """Return the positions at which others can begin once the sequence has computed its
        prompt."""

    @abstractmethod
    def explain(self, seq_id: int, cached_tokens: int) -> tuple[int, MissReason | None]:
        """Return two things: how many of a prompt's first ``cached_tokens`` tokens this group has,
        and the reason that the sequence cannot share all of these, or None if it can."""

    # --- steps ------------------------------------------------------------------------------------

    @abstractmethod
    def reserve(self, seq_id: int, num_tokens: int, drafts: int = 0) -> bool:
        """Get memory for tokens [0, num_tokens). Return False if memory is short or if mappings may
        not change now."""

    def take_waits(self) -> bool:
        """Return True if a mapping was waited for since the last call."""
        return False

    def top_up(self, plan: StepPlan) -> None:  # noqa: B027  # nothing is mapped
        """While no step runs, map what the plan's sequences will need soon."""

    @abstractmethod
    def schedule(self, plan: StepPlan, epoch: int, views: KVViews) -> None:
        """Add the group's rows of step ``epoch`` to its views."""

    def preview(self, plan: StepPlan, views: KVViews) -> None:  # noqa: B027  # it keeps no rows
        """Add the rows of tokens that may come next. The next step computes these rows again."""

    def settled(self, seq_id: int, end: int) -> int:
        """Return the number of the first ``end`` tokens, which are kept, after which this group
        keeps what it knows of them."""
        return end

    @abstractmethod
    def commit(self, seq_id: int, start: int, end: int, epoch: int) -> None:
        """Note that tokens [start, end) are kept, and that step ``epoch`` was read."""

    @abstractmethod
    def cancel_steps(self, seq_id: int) -> int:
        """Drop all planned steps. Return the number of tokens that stay computed. Every group can
        return to the last block boundary before the settled tokens' end, and to none before."""

    @abstractmethod
    def close(self, seq_id: int, epoch: int) -> None:
        """Close a sequence. Its memory can be reused after step ``epoch`` has completed."""

    @abstractmethod
    def step_completed(self, epoch: int, *, is_quiet: bool) -> None:
        """Note that all steps up to ``epoch`` have completed. ``is_quiet`` means that no step
        runs."""

    # --- records in files -------------------------------------------------------------------------

    most_lent = 1
    """The most records of a loan that are written together."""

    def needed(self, position: int) -> range:
        """Return the numbers of the records without which no sequence begins at ``position``."""
        return range(max(0, position - 1), position)

    @abstractmethod
    def has(self, hashes: BlockHashes, number: int) -> bool:
        """Return True if the record with this number is in memory, where sequences can share it."""

    @abstractmethod
    def lend(self, sequence: CachedSequence, numbers: Sequence[int]) -> Loan | None:
        """Pin records that are in memory, to be written. Their numbers ascend. Return None if some
        are not there, or if memory or mappings are short now."""

    @abstractmethod
    def lend_empty(self, sequence: CachedSequence, numbers: range) -> Loan | None:
        """Pin free memory for records to be read. Return None if memory is short now."""

    @abstractmethod
    def adopt(self, loan: Loan, numbers: Collection[int]) -> None:
        """Let sequences share these records of a loan, which have been read and not adopted yet,
        ascending. Those that no sequence can begin at yet are not adopted."""

    def cut_loan(self, loan: Loan, end: int) -> None:  # noqa: B027  # it has one record
        """Unpin the memory of a loan's records from number ``end`` on, which no thread uses."""

    @abstractmethod
    def end_loan(self, loan: Loan) -> None:
        """Unpin a loan's memory, which no other thread uses any more."""

    # --- memory -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def recovering(self) -> bool:
        """True if memory of closed sequences will still become free."""

    @abstractmethod
    def cheapest(self) -> float:
        """Return the worth per byte of the block or slot of least worth, or NOTHING_TO_EVICT."""

    @abstractmethod
    def evict(self) -> None:
        """Evict the block or slot of least worth, if there is one that can be evicted."""

    @abstractmethod
    def release_slack(self, *, runs: bool) -> None:
        """Release free memory beyond the configured amount, if that is possible now. ``runs`` means
        that sequences are open or steps run."""

    @abstractmethod
    def release_idle(self) -> None:
        """Release the memory of all that is free, except one heap. No sequence may be open."""

    def set_limit(self, blocks: int) -> int:
        """Set the limit of used blocks. Return the limit in effect, in bytes."""
        return 0

    def set_memory_pressure(self, *, short: bool) -> None:  # noqa: B027  # nothing is mapped
        """Note whether the system is short of memory."""

    @abstractmethod
    def stats(self) -> KVStats:
        """Return the group's statistics. Each shared block counts once."""

    @abstractmethod
    def add_to(self, kv_map: KVMap) -> None:
        """Add a copy of the state of the group's memory."""

    @abstractmethod
    def check_invariants(self) -> None: ...


def match_all(
    groups: Sequence[KVGroup],
    hashes: BlockHashes,
    start: int,
    in_files: Callable[[int, int], bool] = lambda group, number: False,
) -> tuple[int, int]:
    """Return two positions: the greatest one at which all groups can begin, and the greatest one at
    which any group can. The sequence has all blocks before ``start``. ``in_files`` returns True for
    the number of a group and of a record that count as if they were in memory."""

    def match(position: int) -> list[int]:
        numbered = enumerate(groups)
        return [g.match(hashes, start, position, partial(in_files, n)) for n, g in numbered]

    ends = match(hashes.shareable_blocks)
    wanted = max(ends)
    while min(ends) < max(ends):
        ends = match(min(ends))
    return ends[0], wanted


def evict_cheapest(groups: Sequence[KVGroup]) -> None:
    """Evict what is worth least per byte in any group, then the next, up to EVICTED_AT_ONCE."""
    offers = [group.cheapest() for group in groups]
    for _ in range(evictor.EVICTED_AT_ONCE):
        number = offers.index(min(offers))
        if offers[number] == evictor.NOTHING_TO_EVICT:
            return
        # Evicting a block can raise another group's offer, because states go with their block.
        groups[number].evict()
        offers[number] = groups[number].cheapest()
